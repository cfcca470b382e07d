"""Proximal policy optimization (Schulman et al., 2017), with generalised advantage estimation.

Each iteration samples a batch with the current policy and takes several epochs of minibatch gradient steps on the
clipped surrogate objective. Policy and value function share no weights: all epochs of the one are one jitted call, all
epochs of the other a second, and both run at the same time.
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
from shoal.learning.estimators import assess, explained_variance, mean, standardise, weights_not_finite
from shoal.learning.xla import ready, together
from shoal.policies.networks import MLP
from shoal.policies.policy import Policy, SavedPolicy, Weights
from shoal.policies.start import first_moments, first_weights, load_start
from shoal.sampling import tasks
from shoal.sampling.batch import Batch, make_batch, merged_moments, minibatch_orders
from shoal.sampling.lanes import Lanes, Request, Span
from shoal.sampling.scores import Scores

Samples = dict[str, Array]
"""Samples of a flat batch: name -> (n, ...)."""
Loss = Callable[[Array, Samples], tuple[Array, dict[str, Array]]]
"""(parameters, samples) -> loss and measures."""
Descent = tuple[Array, optax.OptState, dict[str, Array]]
"""Parameters, optimizer state and measures after gradient steps."""


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """Settings of PPO."""

    batch_steps: int = 2048
    """Environment steps per iteration (at least)."""
    batch: Literal["fragments", "episodes"] = "fragments"
    """What a batch consists of: fragments (rollouts of fixed length, cut anywhere) or whole episodes."""
    lanes: int = 4
    """Groups of environments (n_envs = lanes x width); at most this many workers are busy. Changes the result, unlike
    the number of workers."""
    width: int = 8
    """Environments in a lane, stepped together."""
    lag: Literal[0, 1] = 0
    """0: sample and learn in turns. 1: sample the next batch with the previous weights while learning from this one."""
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
    lr: float = 3e-4
    """Learning rate of Adam."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Keep the learning rate constant, or anneal it to zero at the run's last step."""
    clip: float = 0.2
    """Clip range of the probability ratio."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """Keep the clip range constant, or anneal it to zero at the run's last step."""
    value_clip: float | None = None
    """Clip range of the value function, in standard deviations of returns (default: no clipping)."""
    epochs: int = 10
    """Passes over each batch."""
    minibatch: int = 64
    """Samples per gradient step."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    max_grad_norm: float = 0.5
    """Maximum gradient norm, for the policy and the value function separately."""
    max_kl: float | None = None
    """Target KL divergence: stop updating the policy for the rest of the iteration once a minibatch exceeds 1.5 times
    this (default: no limit)."""

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

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate or the clip range is annealed."""
        return "linear" in (self.lr_schedule, self.clip_schedule)

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        found = validation.field_problems(
            self,
            at_least_one=("batch_steps", "lanes", "width", "hidden", "epochs", "minibatch"),
            above_zero=("lr", "clip", "value_clip", "max_grad_norm", "max_kl"),
            not_negative=("entropy",),
            fractions=("gamma", "lam"),
            finite=("log_std_init",),
        )
        if self.lag not in (0, 1):
            found.append(f"lag must be 0 or 1, not {self.lag}")
        if self.lag and self.batch == "episodes":
            found.append("lag 1 requires --batch fragments")
        if self.minibatch > self.batch_steps:
            found.append(f"minibatch ({self.minibatch}) must not be larger than batch_steps ({self.batch_steps})")
        return found


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    """Learn until the caller stops, from the start or from a state; schedules end at `steps` environment steps."""
    spaces = engine.submit(tasks.describe, env.to_record()).result()
    policy = Policy.fitting(spaces, hidden=config.hidden, activation=config.activation, normalise=config.normalise)
    value = MLP((policy.inputs, *config.hidden, 1), config.activation)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
    update = make_update(config, policy, value, optimizer)

    state, saved = state or {}, load_start(config.start)
    params = state.get("policy", {}).get("params", first_weights(policy, saved, seed, config.log_std_init)["params"])
    critic = state.get("value", {}).get("params", value.init(seeding.rng(seed, "value"), out_scale=1.0))
    returns = state.get("value", {}).get("returns", np.zeros(3, np.float32))
    adam = {"policy": optimizer.init(jnp.asarray(params)), "value": optimizer.init(jnp.asarray(critic))}
    if state:
        adam = jax.tree.unflatten(jax.tree.structure(adam), [state["adam"][key] for key in sorted(state["adam"])])
    moments = Moments.from_record(state["moments"]) if state else first_moments(policy, saved)
    scores = Scores(state.get("scores"))
    lanes = Lanes(engine, env, policy, seed, config.lanes, config.width, state.get("lanes"))
    iteration = state.get("iteration", 0)

    def weights() -> Weights:
        mean, scale = moments.normaliser()
        return {"params": np.asarray(params), "mean": mean, "scale": scale}

    acting: Weights = state.get("acting") or weights()
    request: Request | None = None
    learning = Span(0.0, 0.0)
    while True:
        iteration += 1
        if config.batch == "fragments":
            request = request or lanes.request(engine.share(acting), config.fragment_steps)
            records = lanes.collect(request)
        else:
            records = lanes.episodes(engine.share(acting), config.batch_steps)
        timing = {
            "time/sample_seconds": lanes.sampled.seconds,
            "time/overlap_seconds": lanes.sampled.overlap(learning),
        }
        behaviour, request = acting, None
        if config.lag:
            acting = weights()
            request = lanes.request(engine.share(acting), config.fragment_steps)

        begun = time.perf_counter()
        left = max(0.0, 1.0 - scores.steps / steps)
        lr = config.lr * (left if config.lr_schedule == "linear" else 1.0)
        clip = config.clip * (left if config.clip_schedule == "linear" else 1.0)
        batch = make_batch(records)
        orders = minibatch_orders(seeding.rng(seed, "learn", iteration), batch, config.epochs, config.minibatch)
        params, critic, adam, returns, measures = update(
            params, critic, adam, returns, behaviour, batch, orders, np.float32(lr), np.float32(clip)
        )
        measures = {name: float(number) for name, number in measures.items()}
        if not measures.pop("finite"):
            raise LearningFault(weights_not_finite(iteration, measures, f"--lr {config.lr / 10:g}"))
        scores.add(records)
        if config.normalise:
            moments = merged_moments(moments, records)

        if not config.lag:
            acting = weights()
        learned = {
            "policy": {"params": np.asarray(params)},
            "value": {"params": np.asarray(critic), "returns": np.asarray(returns)},
            "adam": {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(adam))},
            "moments": moments.to_record(),
            "scores": scores.state(),
            "iteration": iteration,
            **({"acting": acting} if config.lag else {}),
        }
        ledger = lanes.state()
        learning = Span(begun, time.perf_counter())
        timing["time/learn_seconds"] = learning.seconds
        rates = {"train/learning_rate": lr, "train/clip_range": clip}
        yield Step(
            metrics=scores.metrics() | lanes.metrics() | {"time/iterations": iteration} | measures | rates | timing,
            learned=learned,
            state=lambda learned=learned, ledger=ledger: learned | {"lanes": ledger()},  # type: ignore[misc]
            policy=SavedPolicy(policy, weights(), env.to_record()),
        )


def make_update(
    config: Config, policy: Policy, value: MLP, optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """Build the update of all weights from one batch."""
    distribution = policy.distribution

    def update(
        params: Array,
        critic: Array,
        adam: dict[str, optax.OptState],
        returns: Array,
        behaviour: Weights,
        batch: Batch,
        orders: Array,
        lr: Array,
        clip: Array,
    ) -> tuple[Array, Array, dict[str, optax.OptState], Array, dict[str, Array]]:
        batch, orders = ready((batch, orders))
        known, policy_rows, value_rows, variance = ready(assess_batch(critic, returns, behaviour, batch))
        (new_params, policy_adam, measures), (new_critic, value_adam, fitting) = together(
            lambda: improve(params, adam["policy"], policy_rows, orders, lr, clip),
            lambda: fit(known.critic, adam["value"], value_rows, orders, lr),
        )
        finite = np.isfinite(new_params).all() and np.isfinite(new_critic).all()
        measures |= fitting | {"train/explained_variance": variance, "finite": finite}
        return new_params, new_critic, {"policy": policy_adam, "value": value_adam}, known.returns, measures

    @jax.jit
    def assess_batch(critic: Array, returns: Array, behaviour: Weights, batch: dict[str, Array]) -> Any:
        """Estimate values and advantages of a batch, and flatten it to the samples that both networks learn from."""
        features = policy.features(batch["observations"], behaviour["mean"], behaviour["scale"])
        final_features = policy.features(batch["finals"], behaviour["mean"], behaviour["scale"])
        acted, used = features[:-1], batch["weights"]

        known = assess(value, critic, returns, features, final_features, batch, config.gamma, config.lam)
        old_log_prob = distribution.log_prob(policy.out(behaviour["params"], acted), batch["actions"])

        count = used.size
        both = {"x": acted.reshape(count, -1), "used": used.reshape(count)}
        policy_rows = both | {
            "actions": batch["actions"].reshape(count, -1),
            "estimate": known.estimates.reshape(count),
            "old_log_prob": old_log_prob.reshape(count),
        }
        value_rows = both | {
            "target": known.normal_targets.reshape(count),
            "old_value": known.normal_values.reshape(count),
        }
        return known, policy_rows, value_rows, explained_variance(known.values, known.targets, used)

    @jax.jit
    def improve(params: Array, adam: optax.OptState, rows: Samples, orders: Array, lr: Array, clip: Array) -> Descent:
        def loss(params: Array, rows: Samples) -> tuple[Array, dict[str, Array]]:
            used = rows["used"]
            out = policy.out(params, rows["x"])
            log_ratio = distribution.log_prob(out, rows["actions"]) - rows["old_log_prob"]
            ratio = jnp.exp(log_ratio)
            estimate = standardise(rows["estimate"], used)
            gain = jnp.minimum(ratio * estimate, jnp.clip(ratio, 1 - clip, 1 + clip) * estimate)
            entropy = mean(distribution.entropy(out), used)
            policy_loss = -mean(gain, used)
            return policy_loss - config.entropy * entropy, {
                "train/policy_gradient_loss": policy_loss,
                "train/entropy_loss": -entropy,
                "train/approx_kl": mean(ratio - 1 - log_ratio, used),
                "train/clip_fraction": mean((jnp.abs(ratio - 1) > clip).astype(jnp.float32), used),
            }

        return descend(loss, params, adam, rows, orders, lr)

    @jax.jit
    def fit(critic: Array, adam: optax.OptState, rows: Samples, orders: Array, lr: Array) -> Descent:
        def loss(critic: Array, rows: Samples) -> tuple[Array, dict[str, Array]]:
            predicted = value(critic, rows["x"])[:, 0]
            if config.value_clip is not None:
                old = rows["old_value"]
                predicted = old + jnp.clip(predicted - old, -config.value_clip, config.value_clip)
            value_loss = mean((predicted - rows["target"]) ** 2, rows["used"])
            return value_loss / 2, {"train/value_loss": value_loss}

        return descend(loss, critic, adam, rows, orders, lr)

    def descend(loss: Loss, params: Array, adam: optax.OptState, rows: Samples, orders: Array, lr: Array) -> Descent:
        """Take gradient steps on minibatches; measures are means over the last epoch."""
        limit = jnp.inf if config.max_kl is None else 1.5 * config.max_kl

        def step(carry: Any, piece: Samples) -> tuple[Any, dict[str, Array]]:
            params, adam, stopped = carry
            (_, measures), gradient = jax.value_and_grad(loss, has_aux=True)(params, piece)
            change, new_adam = optimizer.update(gradient, adam, params)
            stopped |= measures.get("train/approx_kl", 0.0) > limit
            keep = stopped | (piece["used"].sum() == 0)  # a minibatch of padding alone has no gradient
            new_params = jnp.where(keep, params, params - lr * change)
            new_adam = jax.tree.map(lambda new, old: jnp.where(keep, old, new), new_adam, adam)
            return (new_params, new_adam, stopped), measures

        def epoch(carry: Any, order: Array) -> tuple[Any, dict[str, Array]]:
            # Gathering the shuffled batch once and cutting it is twice as fast as gathering every minibatch.
            pieces = {name: row[order.reshape(-1)].reshape(*order.shape, *row.shape[1:]) for name, row in rows.items()}
            carry, measures = jax.lax.scan(step, carry, pieces)
            return carry, jax.tree.map(jnp.nanmean, measures)

        start = (params, adam, jnp.zeros((), bool))
        (params, adam, _), measures = jax.lax.scan(epoch, start, orders)
        return params, adam, jax.tree.map(lambda x: x[-1], measures)

    return update
