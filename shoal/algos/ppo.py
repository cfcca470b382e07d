"""Proximal policy optimization (Schulman et al., 2017), with generalised advantage estimates.

Each iteration samples a batch with the current policy and takes several passes of minibatch gradient steps on a
surrogate that is clipped where the policy has moved too far. Policy and value function share no weights: all passes of
the one are a jitted call, all passes of the other another, and both run at the same time.
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

from shoal.algos import Step
from shoal.base import seeding, validation
from shoal.base.moments import Moments
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec, describe
from shoal.errors import LearningFault
from shoal.learning.estimators import assess, explained_variance, mean, standardise
from shoal.learning.xla import ready, together
from shoal.policies import actions
from shoal.policies.networks import MLP
from shoal.policies.policy import Policy, SavedPolicy
from shoal.sampling.batch import make_batch, merged_moments, minibatch_orders
from shoal.sampling.lanes import Asked, Lanes
from shoal.sampling.scores import Scores


@dataclass(frozen=True)
class Config:
    """Settings of PPO."""

    batch_steps: int = 2048
    """Environment steps per iteration (at least)."""
    batch: Literal["fragments", "episodes"] = "fragments"
    """What a batch is made of: fixed fragments, cut anywhere, or whole episodes."""
    lanes: int = 4
    """Groups of environments; at most this many workers are busy. Part of the result, unlike the number of workers."""
    width: int = 8
    """Environments in a lane, stepped together."""
    lag: Literal[0, 1] = 0
    """0: act and learn in turns. 1: act the next batch while one is learned from, with the weights from before."""
    gamma: float = 0.99
    """Discount per step."""
    lam: float = 0.95
    """Weight of longer returns in the advantage estimate."""
    hidden: tuple[int, ...] = (64, 64)
    """Hidden layers of the policy and of the value function."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Hidden activation."""
    log_std_init: float = 0.0
    """Log standard deviation of a new policy's actions, where they are numbers."""
    normalise: bool = True
    """Shift and scale observations by their running statistics."""
    lr: float = 3e-4
    """Adam's learning rate."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Whether the learning rate falls to zero at the run's last step."""
    clip: float = 0.2
    """How far the probability ratio may move from 1 before it stops to count."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """Whether the clip range falls to zero at the run's last step."""
    value_clip: float | None = None
    """How far a value may move, in deviations of returns, before it stops to count; no limit unless told."""
    epochs: int = 10
    """Passes over the batch."""
    minibatch: int = 64
    """Samples per gradient step."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: float = 0.5
    """Longer gradients are shortened to this, those of the policy and those of the value function apart."""
    max_kl: float | None = None
    """Leave the policy as it is for the rest of an update once a minibatch has moved it by 1.5 times this KL
    divergence; never unless told."""

    @property
    def fragment_steps(self) -> int:
        """Steps of a fragment: the batch divided over all slots."""
        return -(-self.batch_steps // (self.lanes * self.width))

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
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
            found.append("lag 1 goes with --batch fragments only")
        if self.minibatch > self.batch_steps:
            found.append(f"minibatch ({self.minibatch}) must not be larger than batch_steps ({self.batch_steps})")
        return found


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    """Learn for ever, from the start or from a state; schedules end at `steps` environment steps."""
    spaces = engine.submit(describe, env.to_tree()).result()
    policy = Policy(
        tuple(spaces["shape"]), spaces["dtype"], actions.from_tree(spaces["head"]),
        config.hidden, config.activation, config.normalise,
    )  # fmt: skip
    value = MLP((policy.inputs, *config.hidden, 1), config.activation)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
    update = make_update(config, policy, value, optimizer)

    state = state or {}
    params = state.get("policy", {}).get("params", policy.init(seeding.rng(seed, "weights"), config.log_std_init))
    critic = state.get("value", {}).get("params", value.init(seeding.rng(seed, "value"), out_scale=1.0))
    returns = state.get("value", {}).get("returns", np.zeros(3, np.float32))
    adam = {"policy": optimizer.init(jnp.asarray(params)), "value": optimizer.init(jnp.asarray(critic))}
    if state:
        adam = jax.tree.unflatten(jax.tree.structure(adam), [state["adam"][key] for key in sorted(state["adam"])])
    moments = Moments.from_tree(state["moments"]) if state else Moments.empty(policy.inputs)
    scores = Scores(state.get("scores"))
    lanes = Lanes(engine, env, policy, seed, config.lanes, config.width, state.get("lanes"))
    iteration = state.get("iteration", 0)

    def weights() -> Tree:
        shift, scale = moments.normaliser()
        return {"params": np.asarray(params), "mean": shift, "scale": scale}

    acting = state.get("acting") or weights()
    asked: Asked | None = None
    learned_from = learned_to = 0.0
    while True:
        iteration += 1
        begun = time.perf_counter()
        if config.batch == "fragments":
            asked = asked or lanes.ask(engine.share(acting), config.fragment_steps)
            records = lanes.take(asked)
            begun, sampled = asked.begun, asked.done
        else:
            records = lanes.episodes(engine.share(acting), config.batch_steps)
            sampled = time.perf_counter()
        overlap = max(0.0, min(sampled, learned_to) - max(begun, learned_from))
        behaviour, asked = acting, None
        if config.lag:
            acting = weights()
            asked = lanes.ask(engine.share(acting), config.fragment_steps)

        learned_from = time.perf_counter()
        left = max(0.0, 1.0 - scores.steps / steps)
        lr = config.lr * (left if config.lr_schedule == "linear" else 1.0)
        clip = config.clip * (left if config.clip_schedule == "linear" else 1.0)
        batch = make_batch(records)
        orders = minibatch_orders(seeding.rng(seed, "learn", iteration), batch, config.epochs, config.minibatch)
        params, critic, adam, returns, learning = update(
            params, critic, adam, returns, behaviour, batch, orders, np.float32(lr), np.float32(clip)
        )
        learning = {name: float(number) for name, number in learning.items()}
        if not learning.pop("finite"):
            raise LearningFault(
                f"iteration {iteration} computed weights that are not finite ({learning}); they were not kept. "
                f"Likely causes: rewards that are far too large, or a learning rate that is; "
                f"try --lr {config.lr / 10:g}"
            )
        scores.add(records)
        if config.normalise:
            moments = merged_moments(moments, records)

        if not config.lag:
            acting = weights()
        learned = {
            "policy": {"params": np.asarray(params)},
            "value": {"params": np.asarray(critic), "returns": np.asarray(returns)},
            "adam": {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(adam))},
            "moments": moments.to_tree(),
            "scores": scores.state(),
            "iteration": iteration,
            **({"acting": acting} if config.lag else {}),
        }
        ledger = lanes.state()
        learned_to = time.perf_counter()
        timing = {
            "time/sample_seconds": sampled - begun,
            "time/learn_seconds": learned_to - learned_from,
            "time/overlap_seconds": overlap,
        }
        rates = {"train/learning_rate": lr, "train/clip_range": clip}
        yield Step(
            metrics=scores.metrics() | {"time/iterations": iteration} | learning | rates | timing,
            learned=learned,
            state=lambda learned=learned, ledger=ledger: learned | {"lanes": ledger()},  # type: ignore[misc]
            policy=SavedPolicy(policy, weights(), env.to_tree()),
        )


def make_update(config: Config, policy: Policy, value: MLP, optimizer: Any) -> Callable[..., Any]:
    """The whole learning step as one function of arrays."""
    head = policy.head

    def update(
        params: Any,
        critic: Any,
        adam: Any,
        returns: Any,
        behaviour: Any,
        batch: Any,
        orders: Any,
        lr: Any,
        clip: Any,
    ) -> Any:
        batch, orders = ready((batch, orders))
        known, policy_rows, value_rows, variance = ready(look(critic, returns, behaviour, batch))
        (new_params, policy_adam, learning), (new_critic, value_adam, fitting) = together(
            lambda: improve(params, adam["policy"], policy_rows, orders, lr, clip),
            lambda: fit(known.critic, adam["value"], value_rows, orders, lr),
        )
        finite = np.isfinite(new_params).all() and np.isfinite(new_critic).all()
        learning |= fitting | {"train/explained_variance": variance, "finite": finite}
        return new_params, new_critic, {"policy": policy_adam, "value": value_adam}, known.returns, learning

    @jax.jit
    def look(critic: Any, returns: Any, behaviour: Any, batch: Any) -> Any:
        """What the value function says of a batch, and the samples that both learn from."""
        features = policy.features(batch["observations"], behaviour["mean"], behaviour["scale"])
        final_features = policy.features(batch["finals"], behaviour["mean"], behaviour["scale"])
        acted, used = features[:-1], batch["weights"]

        known = assess(value, critic, returns, features, final_features, batch, config.gamma, config.lam)
        old_log_prob = head.log_prob(policy.out(behaviour["params"], acted), batch["actions"])

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
    def improve(params: Any, adam: Any, rows: Any, orders: Any, lr: Any, clip: Any) -> Any:
        def loss(params: Any, rows: Any) -> Any:
            used = rows["used"]
            out = policy.out(params, rows["x"])
            log_ratio = head.log_prob(out, rows["actions"]) - rows["old_log_prob"]
            ratio = jnp.exp(log_ratio)
            estimate = standardise(rows["estimate"], used)
            gain = jnp.minimum(ratio * estimate, jnp.clip(ratio, 1 - clip, 1 + clip) * estimate)
            entropy = mean(head.entropy(out), used)
            policy_loss = -mean(gain, used)
            return policy_loss - config.entropy * entropy, {
                "train/policy_gradient_loss": policy_loss,
                "train/entropy_loss": -entropy,
                "train/approx_kl": mean(ratio - 1 - log_ratio, used),
                "train/clip_fraction": mean((jnp.abs(ratio - 1) > clip).astype(jnp.float32), used),
            }

        return descend(loss, params, adam, rows, orders, lr)

    @jax.jit
    def fit(critic: Any, adam: Any, rows: Any, orders: Any, lr: Any) -> Any:
        def loss(critic: Any, rows: Any) -> Any:
            predicted = value(critic, rows["x"])[:, 0]
            if config.value_clip is not None:
                old = rows["old_value"]
                predicted = old + jnp.clip(predicted - old, -config.value_clip, config.value_clip)
            value_loss = mean((predicted - rows["target"]) ** 2, rows["used"])
            return value_loss / 2, {"train/value_loss": value_loss}

        return descend(loss, critic, adam, rows, orders, lr)

    def descend(loss: Callable[..., Any], params: Any, adam: Any, rows: Any, orders: Any, lr: Any) -> Any:
        """Gradient steps on minibatches; measures are means over the last pass."""
        limit = jnp.inf if config.max_kl is None else 1.5 * config.max_kl

        def step(carry: Any, piece: Any) -> Any:
            params, adam, stopped = carry
            (_, measures), gradient = jax.value_and_grad(loss, has_aux=True)(params, piece)
            change, new_adam = optimizer.update(gradient, adam, params)
            stopped |= measures.get("train/approx_kl", 0.0) > limit
            keep = stopped | (piece["used"].sum() == 0)  # nothing but padding has no gradient
            new_params = jnp.where(keep, params, params - lr * change)
            new_adam = jax.tree.map(lambda new, old: jnp.where(keep, old, new), new_adam, adam)
            return (new_params, new_adam, stopped), measures

        def epoch(carry: Any, order: Any) -> Any:
            # Gathering the shuffled batch once and cutting it is twice as fast as gathering every minibatch.
            pieces = {name: row[order.reshape(-1)].reshape(*order.shape, *row.shape[1:]) for name, row in rows.items()}
            carry, measures = jax.lax.scan(step, carry, pieces)
            return carry, jax.tree.map(jnp.nanmean, measures)

        start = (params, adam, jnp.zeros((), bool))
        (params, adam, _), measures = jax.lax.scan(epoch, start, orders)
        return params, adam, jax.tree.map(lambda x: x[-1], measures)

    return update
