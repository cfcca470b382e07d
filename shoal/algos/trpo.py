"""Trust region policy optimization (Schulman et al., 2015), with generalised advantage estimation.

Each iteration samples a batch with the current policy, takes one natural-gradient step whose size is bounded by the KL
divergence from the old policy, and fits the value function. The two share no weights: each is one jitted call, and both
run at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shoal.algos.base import AlgorithmConfig, Step
from shoal.base import seeding, validation
from shoal.base.arrays import Array
from shoal.base.moments import Moments
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import LearningFault
from shoal.learning.estimators import (
    assess,
    conjugate_gradient,
    explained_variance,
    mean,
    standardise,
    weights_not_finite,
)
from shoal.learning.xla import ready, together
from shoal.policies.networks import MLP
from shoal.policies.policy import Policy, SavedPolicy, Weights
from shoal.policies.start import first_moments, first_weights, load_start
from shoal.sampling import tasks
from shoal.sampling.batch import Batch, make_batch, merged_moments, minibatch_orders
from shoal.sampling.lanes import Lanes
from shoal.sampling.scores import Scores


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """Settings of TRPO."""

    batch_steps: int = 4096
    """Environment steps per iteration (at least)."""
    batch: Literal["fragments", "episodes"] = "fragments"
    """What a batch consists of: fragments (rollouts of fixed length, cut anywhere) or whole episodes."""
    lanes: int = 8
    """Groups of environments (n_envs = lanes x width); at most this many workers are busy. Changes the result, unlike
    the number of workers."""
    width: int = 8
    """Environments in a lane, stepped together."""
    gamma: float = 0.99
    """Discount factor."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""
    hidden: tuple[int, ...] = (64, 64)
    """Hidden layers of the policy and of the value function."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the hidden layers."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""
    normalise: bool = True
    """Normalise observations by their running mean and standard deviation."""
    max_kl: float = 0.01
    """Size of the trust region: maximum mean KL divergence per iteration."""
    cg_iterations: int = 10
    """Conjugate-gradient steps for the natural gradient."""
    cg_damping: float = 0.1
    """Damping: added to the diagonal of the Fisher matrix."""
    fisher_stride: int = 1
    """Use every k-th sample for Fisher-vector products: faster, less exact."""
    line_search_steps: int = 10
    """Maximum number of backtracking steps of the line search."""
    line_search_shrink: float = 0.8
    """Factor by which the line search shortens the step each time."""
    value_lr: float = 1e-3
    """Learning rate of Adam for the value function."""
    value_epochs: int = 10
    """Passes over each batch when fitting the value function."""
    value_batch: int = 128
    """Samples per gradient step of the value function."""

    @property
    def fragment_steps(self) -> int:
        """Steps of a fragment: the batch divided by the number of slots."""
        return -(-self.batch_steps // (self.lanes * self.width))

    @property
    def samples(self) -> Literal["fragments", "episodes"]:
        """What a batch consists of."""
        return self.batch

    @property
    def steps_per_iteration(self) -> int | None:
        """Environment steps of one iteration; whole episodes take a varying number."""
        return self.fragment_steps * self.lanes * self.width if self.batch == "fragments" else None

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        found = validation.field_problems(
            self,
            at_least_one=(
                "batch_steps", "lanes", "width", "hidden", "cg_iterations", "fisher_stride", "line_search_steps",
                "value_batch",
            ),
            above_zero=("max_kl", "value_lr"),
            not_negative=("cg_damping", "value_epochs"),
            fractions=("gamma", "lam"),
            finite=("log_std_init",),
        )  # fmt: skip
        if not 0 < self.line_search_shrink < 1:
            found.append(f"line_search_shrink must be between 0 and 1, not {self.line_search_shrink}")
        return found


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    """Learn until the caller stops, from the start or from a state. TRPO has no schedules, so `steps` is not used."""
    spaces = engine.submit(tasks.describe, env.to_record()).result()
    policy = Policy.fitting(spaces, hidden=config.hidden, activation=config.activation, normalise=config.normalise)
    value = MLP((policy.inputs, *config.hidden, 1), config.activation)
    optimizer = optax.adam(config.value_lr)
    update = make_update(config, policy, value, optimizer)

    state, saved = state or {}, load_start(config.start)
    params = state.get("policy", {}).get("params", first_weights(policy, saved, seed, config.log_std_init)["params"])
    critic = state.get("value", {}).get("params", value.init(seeding.rng(seed, "value"), out_scale=1.0))
    returns = state.get("value", {}).get("returns", np.zeros(3, np.float32))
    adam = optimizer.init(jnp.asarray(critic))
    if state:
        adam = jax.tree.unflatten(jax.tree.structure(adam), [state["adam"][key] for key in sorted(state["adam"])])
    moments = Moments.from_record(state["moments"]) if state else first_moments(policy, saved)
    scores = Scores(state.get("scores"))
    lanes = Lanes(engine, env, policy, seed, config.lanes, config.width, state.get("lanes"))
    iteration = state.get("iteration", 0)

    while True:
        iteration += 1
        shift, scale = moments.normaliser()
        weights = engine.share({"params": np.asarray(params), "mean": shift, "scale": scale})
        if config.batch == "fragments":
            records = lanes.collect(lanes.request(weights, config.fragment_steps))
        else:
            records = lanes.episodes(weights, config.batch_steps)

        batch = make_batch(records)
        orders = minibatch_orders(seeding.rng(seed, "learn", iteration), batch, config.value_epochs, config.value_batch)
        params, critic, adam, returns, measures = update(params, critic, adam, returns, shift, scale, batch, orders)
        measures = {name: float(number) for name, number in measures.items()}
        if not measures.pop("finite"):
            raise LearningFault(weights_not_finite(iteration, measures, f"--value-lr {config.value_lr / 10:g}"))
        scores.add(records)
        if config.normalise:
            moments = merged_moments(moments, records)

        new_shift, new_scale = moments.normaliser()
        current: Weights = {"params": np.asarray(params), "mean": new_shift, "scale": new_scale}
        learned = {
            "policy": {"params": np.asarray(params)},
            "value": {"params": np.asarray(critic), "returns": np.asarray(returns)},
            "adam": {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(adam))},
            "moments": moments.to_record(),
            "scores": scores.state(),
            "iteration": iteration,
        }
        ledger = lanes.state()
        timing = {
            "time/sample_seconds": lanes.sampled.seconds,
            "time/learn_seconds": time.perf_counter() - lanes.sampled.done,
        }
        yield Step(
            metrics=scores.metrics() | lanes.metrics() | {"time/iterations": iteration} | measures | timing,
            learned=learned,
            state=lambda learned=learned, ledger=ledger: learned | {"lanes": ledger()},  # type: ignore[misc]
            policy=SavedPolicy(policy, current, env.to_record()),
        )


def make_update(
    config: Config, policy: Policy, value: MLP, optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """Build the update of all weights from one batch."""
    distribution = policy.distribution

    def update(
        params: Array, critic: Array, adam: optax.OptState, returns: Array, shift: Array, scale: Array, batch: Batch,
        orders: Array,
    ) -> tuple[Array, Array, optax.OptState, Array, dict[str, Array]]:  # fmt: skip
        batch, orders = ready((batch, orders))
        known, acted, estimates, variance = ready(assess_batch(critic, returns, shift, scale, batch))
        used = batch["weights"]
        (new_params, measures), (new_critic, new_adam, value_loss) = together(
            lambda: policy_step(params, acted, batch["actions"], estimates, used),
            lambda: value_fit(known.critic, adam, acted, known.normal_targets, used, orders),
        )
        finite = np.isfinite(new_params).all() and np.isfinite(new_critic).all()
        measures |= {"train/value_loss": value_loss, "train/explained_variance": variance, "finite": finite}
        return new_params, new_critic, new_adam, known.returns, measures

    @jax.jit
    def assess_batch(critic: Array, returns: Array, shift: Array, scale: Array, batch: dict[str, Array]) -> Any:
        """Estimate values and advantages of a batch."""
        features = policy.features(batch["observations"], shift, scale)
        final_features = policy.features(batch["finals"], shift, scale)
        acted, used = features[:-1], batch["weights"]
        known = assess(value, critic, returns, features, final_features, batch, config.gamma, config.lam)
        variance = explained_variance(known.values, known.targets, used)
        return known, acted, standardise(known.estimates, used), variance

    @jax.jit
    def policy_step(
        params: Array, x: Array, actions: Array, estimates: Array, used: Array
    ) -> tuple[Array, dict[str, Array]]:
        old = policy.out(params, x)
        old_log_prob = distribution.log_prob(old, actions)

        def objective(new_params: Array) -> Array:
            ratio = jnp.exp(distribution.log_prob(policy.out(new_params, x), actions) - old_log_prob)
            return mean(ratio * estimates, used)

        def divergence(new_params: Array) -> Array:
            return mean(distribution.kl(old, policy.out(new_params, x)), used)

        before, gradient = jax.value_and_grad(objective)(params)

        # Fisher product as J^T F J: one linearisation serves all conjugate-gradient steps.
        stride = config.fisher_stride
        fisher_x, fisher_used = x[::stride], used[::stride]
        fisher_out, forward = jax.linearize(lambda p: policy.out(p, fisher_x), params)
        backward = jax.linear_transpose(forward, params)
        share = (fisher_used / fisher_used.sum())[..., None]

        def fisher_product(vector: Array) -> Array:
            (image,) = backward(share * distribution.fisher(fisher_out, forward(vector)))
            return image + config.cg_damping * vector

        direction = conjugate_gradient(fisher_product, gradient, config.cg_iterations)
        # The longest step for which the quadratic model of the KL stays within the trust region.
        length = jnp.sqrt(2 * config.max_kl / (direction @ fisher_product(direction) + 1e-8))
        step = length * direction

        def too_long(search: Any) -> Array:
            tries, _, accepted, *_ = search
            return (tries < config.line_search_steps) & ~accepted

        def shorten(search: Any) -> Any:
            tries, *_ = search
            fraction = config.line_search_shrink**tries
            candidate = params + fraction * step
            after, kl = objective(candidate), divergence(candidate)
            return tries + 1, fraction, (kl <= config.max_kl) & (after > before), after, kl

        zero = jnp.zeros(())
        start = (jnp.zeros((), jnp.int32), zero, jnp.zeros((), bool), before, zero)
        _, fraction, accepted, after, kl = jax.lax.while_loop(too_long, shorten, start)
        new_params = jnp.where(accepted, params + fraction * step, params)
        return new_params, {
            "train/policy_objective": jnp.where(accepted, after, before) - before,
            "train/kl_divergence_loss": jnp.where(accepted, kl, 0.0),
            "train/is_line_search_success": accepted.astype(jnp.float32),
            "train/step_fraction": jnp.where(accepted, fraction, 0.0),
            "train/entropy_loss": -mean(distribution.entropy(old), used),
        }

    @jax.jit
    def value_fit(
        critic: Array, adam: optax.OptState, x: Array, targets: Array, used: Array, orders: Array
    ) -> tuple[Array, optax.OptState, Array]:
        count = targets.size
        rows = [x.reshape(count, -1), targets.reshape(count), used.reshape(count)]

        def loss(parameters: Array, x: Array, target: Array, weight: Array) -> Array:
            error = value(parameters, x)[:, 0] - target
            return (weight * error**2).sum() / jnp.maximum(weight.sum(), 1.0)

        def minibatch(carry: Any, at: Any) -> tuple[Any, Array]:
            parameters, optimizer_state = carry
            number, gradient = jax.value_and_grad(loss)(parameters, *at)
            change, optimizer_state = optimizer.update(gradient, optimizer_state, parameters)
            return (optax.apply_updates(parameters, change), optimizer_state), number

        def epoch(carry: Any, order: Array) -> tuple[Any, Array]:
            # Gathering the shuffled batch once and cutting it is twice as fast as gathering every minibatch.
            pieces = [row[order.reshape(-1)].reshape(*order.shape, *row.shape[1:]) for row in rows]
            carry, losses = jax.lax.scan(minibatch, carry, pieces)
            return carry, losses.mean()

        (critic, adam), losses = jax.lax.scan(epoch, (critic, adam), orders)
        return critic, adam, losses[-1] if config.value_epochs else jnp.zeros(())

    return update
