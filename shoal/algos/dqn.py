"""Deep Q-learning (Mnih et al., 2015) with concurrent sampling and learning, and double targets (van Hasselt, 2016).

Each iteration is a round: every slot takes a fixed number of steps with one set of weights, and the learner takes as
many gradient steps on minibatches from the replay buffer as the replay ratio asks for. With a lag of 1, each round is
sampled while the learner works on the rounds before it; with a lag of 0, the round is sampled first. Either way the
data of every gradient step is fixed, so the result is the same on every engine.

Gradient steps come in blocks of a fixed length. The minibatches of a block are drawn together and the block is one
jitted call; with prioritised replay, priorities change after each block and not after each step.
"""

from __future__ import annotations

import math
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
from shoal.base.memory import available_memory
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import LearningFault, UsageError
from shoal.learning.estimators import weights_not_finite
from shoal.learning.replay_buffer import Layout, ReplayBuffer
from shoal.policies import actions
from shoal.policies.actions import Categorical, DistributionRecord, EpsilonGreedy
from shoal.policies.policy import Policy, SavedPolicy, Statistics, Weights
from shoal.policies.start import first_weights, load_start
from shoal.sampling import tasks
from shoal.sampling.lanes import Lanes, Span
from shoal.sampling.scores import Scores

Layers = list[tuple[Array, Array]]
"""Weights and biases of a network, layer by layer."""


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """Settings of DQN."""

    batch_steps: int = 256
    """Environment steps per iteration (at least)."""
    lanes: int = 2
    """Groups of environments (n_envs = lanes x width); at most this many workers are busy. Changes the result, unlike
    the number of workers."""
    width: int = 4
    """Environments in a lane, stepped together."""
    lag: Literal[0, 1] = 1
    """1: learn from the previous rounds while this round is sampled. 0: sample and learn in turns."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 1
    """Number of steps of n-step returns."""
    hidden: tuple[int, ...] = (256, 256)
    """Hidden layers."""
    activation: Literal["tanh", "relu"] = "relu"
    """Activation of the hidden layers."""
    dueling: bool = False
    """Dueling network: separate state-value and advantage streams."""
    double: bool = True
    """Double Q-learning: the online network chooses the action that the target network evaluates."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Keep the learning rate constant, or anneal it to zero at the run's last step."""
    loss: Literal["huber", "squared"] = "huber"
    """Loss of the TD error: Huber, or its square."""
    max_grad_norm: float = 10.0
    """Maximum gradient norm."""
    minibatch: int = 64
    """Transitions per gradient step."""
    replay_ratio: float = 0.5
    """Gradient steps per environment step."""
    block: int = 128
    """Maximum number of gradient steps in one jitted call, which holds all their minibatches in memory."""
    target_every: int = 128
    """Gradient steps between updates of the target network."""
    tau: float = 1.0
    """Soft update of the target network: 1 copies the online network; for Polyak averaging use 0.005 and
    --target-every 1."""
    buffer_size: int = 100_000
    """Size of the replay buffer, in environment steps."""
    learning_starts: int = 1000
    """Environment steps with random actions before the first gradient step."""
    epsilon_start: float = 1.0
    """Initial exploration rate."""
    epsilon: float = 0.05
    """Final exploration rate."""
    epsilon_steps: int = 10_000
    """Environment steps over which the exploration rate is annealed."""
    ladder: float = 0.0
    """Explore at different rates: from epsilon in the first slot to epsilon ** (1 + this) in the last (Ape-X: 7)."""
    priority: float = 0.0
    """Prioritised replay: exponent (alpha) of the TD error, usually 0.6; 0 samples uniformly."""
    priority_weight: float = 0.4
    """Importance-sampling exponent (beta): 0 is no correction, 1 full correction."""

    @property
    def slots(self) -> int:
        """Total number of environments."""
        return self.lanes * self.width

    @property
    def fragment_steps(self) -> int:
        """Steps of a fragment: the round divided by the number of slots."""
        return -(-self.batch_steps // self.slots)

    @property
    def block_steps(self) -> int:
        """Gradient steps in one jitted call: as many as a round needs, at most `block`."""
        return max(1, min(self.block, int(self.replay_ratio * self.fragment_steps * self.slots)))

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps of a round."""
        return self.fragment_steps * self.slots

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate is annealed."""
        return self.lr_schedule == "linear"

    def exploration(self, steps: int) -> float:
        """Compute the exploration rate of a round that begins after this many environment steps."""
        if steps < self.learning_starts:
            return 1.0
        done = min(1.0, steps / self.epsilon_steps) if self.epsilon_steps else 1.0
        return self.epsilon_start + done * (self.epsilon - self.epsilon_start)

    def epsilons(self, base: float) -> np.ndarray:
        """Compute the exploration rate of each slot (lanes, width) float32."""
        place = np.arange(self.slots) / max(1, self.slots - 1)
        return (base ** (1 + self.ladder * place)).astype(np.float32).reshape(self.lanes, self.width)

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        found = validation.field_problems(
            self,
            at_least_one=(
                "batch_steps", "lanes", "width", "n_step", "hidden", "minibatch", "block", "target_every",
                "buffer_size",
            ),
            above_zero=("lr", "max_grad_norm", "replay_ratio", "tau"),
            not_negative=("learning_starts", "epsilon_steps", "ladder", "priority"),
            fractions=("gamma", "tau", "epsilon_start", "epsilon", "priority_weight"),
        )  # fmt: skip
        if self.lag not in (0, 1):
            found.append(f"lag must be 0 or 1, not {self.lag}")
        if self.dueling and not self.hidden:
            found.append("dueling needs at least one hidden layer")
        if not found and self.buffer_size < max(self.batch_steps, self.n_step * self.slots):
            found.append(
                f"buffer_size ({self.buffer_size}) must hold at least a round ({self.batch_steps} steps) and n_step "
                f"steps of each of {self.slots} slots ({self.n_step * self.slots} steps)"
            )
        return found


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    """Learn until the caller stops, from the start or from a state; a learning-rate schedule ends at `steps` steps."""
    spaces = engine.submit(tasks.describe, env.to_record()).result()
    policy = Policy.fitting(
        spaces, _q_values(spaces["distribution"], env),
        hidden=config.hidden, activation=config.activation, dueling=config.dueling,
    )  # fmt: skip
    layout = Layout(
        config.buffer_size, config.slots, config.fragment_steps, policy.observation_shape, policy.observation_dtype,
        prioritised=config.priority > 0,
    )  # fmt: skip
    layout.check(available_memory())
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam())
    update = jax.jit(make_update(config, policy, optimizer))

    state, saved = state or {}, load_start(config.start)
    params = state.get("policy", {}).get("params", first_weights(policy, saved, seed)["params"])
    target = state.get("target", {}).get("params", params)
    adam = optimizer.init(policy.network.layers(jnp.asarray(params)))
    if state:
        adam = jax.tree.unflatten(jax.tree.structure(adam), [state["adam"][key] for key in sorted(state["adam"])])
    buffer = ReplayBuffer(
        layout, config.gamma, config.n_step, config.priority, config.priority_weight, state.get("buffer")
    )
    scores = Scores(state.get("scores"))
    lanes = Lanes(engine, env, policy, seed, config.lanes, config.width, state.get("lanes"))
    iteration, updates = state.get("iteration", 0), state.get("updates", 0)
    unscaled: Statistics = {"mean": np.zeros(policy.inputs, np.float32), "scale": np.ones(policy.inputs, np.float32)}

    while True:
        iteration += 1
        epsilon = config.exploration(scores.steps)
        lr = config.lr * (max(0.0, 1.0 - scores.steps / steps) if config.lr_schedule == "linear" else 1.0)
        acting: Weights = {"params": np.asarray(params), "epsilon": config.epsilons(epsilon), **unscaled}
        request = lanes.request(engine.share(acting), config.fragment_steps)
        if config.lag == 0:
            records = lanes.collect(request)
            buffer.add(records)

        begun = time.perf_counter()
        measures = []
        due = int(config.replay_ratio * (buffer.steps - config.learning_starts)) - updates
        for _ in range(due // config.block_steps if buffer.starts[1] else 0):
            rng = seeding.rng(seed, "replay", updates)
            transitions, places = buffer.draw(rng, config.block_steps, config.minibatch)
            params, target, adam, errors, measured = update(
                params, target, adam, transitions, np.int32(updates), np.float32(lr)
            )
            updates += config.block_steps
            measures.append(measured)
            if config.priority:
                buffer.reweigh(places, np.asarray(errors))
        learning = {name: float(np.mean([m[name] for m in measures])) for name in (measures or [{}])[0]}
        learner = Span(begun, time.perf_counter())
        if learning.pop("finite", 1.0) < 1:
            raise LearningFault(weights_not_finite(iteration, learning, f"--lr {config.lr / 10:g}"))

        if config.lag == 1:
            records = lanes.collect(request)
            buffer.add(records)
        scores.add(records)

        learned = {
            "policy": {"params": np.asarray(params)},
            "target": {"params": np.asarray(target)},
            "adam": {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(adam))},
            "scores": scores.state(),
            "iteration": iteration,
            "updates": updates,
        }
        rest = {"lanes": lanes.state(), "buffer": buffer.state()}
        timing = {
            "time/sample_seconds": lanes.sampled.seconds,
            "time/learn_seconds": learner.seconds,
            "time/overlap_seconds": lanes.sampled.overlap(learner),
        }
        rates = {
            "rollout/exploration_rate": epsilon,
            "train/learning_rate": lr,
            "train/n_updates": updates,
        }
        now: Weights = {"params": np.asarray(params), "epsilon": np.full((1, 1), epsilon, np.float32), **unscaled}
        yield Step(
            metrics=scores.metrics() | lanes.metrics() | {"time/iterations": iteration} | learning | rates | timing,
            learned=learned,
            state=lambda learned=learned, rest=rest: learned | {key: made() for key, made in rest.items()},  # type: ignore[misc]
            policy=SavedPolicy(policy, now, env.to_record()),
        )


def _q_values(record: DistributionRecord, env: EnvSpec) -> EpsilonGreedy:
    """Choose actions by Q-value; refuse environments whose action space is not Discrete."""
    found = actions.from_record(record)
    if not isinstance(found, Categorical) or not found.scalar:
        raise UsageError(
            f"dqn needs a Discrete action space, and {env.id} has another one. "
            f"Use another algorithm: shoal train ppo {env.id}"
        )
    return EpsilonGreedy(found.choices, found.start, found.scalar)


def make_update(config: Config, policy: Policy, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Build a block of gradient steps, for `jax.jit`.

    It takes parameters, target parameters, the optimizer's state, `Transitions` (steps, minibatch), the number of
    previous gradient steps and the learning rate. It returns the first three updated, TD errors (steps, minibatch) and
    measures.
    """
    network = policy.network

    def values(layers: Layers, observations: Array) -> Array:
        return network.apply(layers, policy.features(observations, None, None))

    def loss(layers: Layers, drawn: Any, following: Array) -> tuple[Array, tuple[Array, Array]]:
        worth = values(layers, drawn.observations)
        chosen = _pick(worth, drawn.actions)
        best = (values(layers, drawn.following) if config.double else following).argmax(axis=-1)
        aim = drawn.returns + drawn.discounts * _pick(following, best)
        error = chosen - jax.lax.stop_gradient(aim)
        cost = optax.losses.huber_loss(error) if config.loss == "huber" else error**2
        return (drawn.weights * cost).mean(), (error, worth.mean())

    def update(
        params: Array, target: Array, adam: optax.OptState, transitions: Any, updates: Array, lr: Array
    ) -> tuple[Array, Array, optax.OptState, Array, dict[str, Array]]:
        def step(carry: Any, drawn: Any) -> tuple[Any, tuple[Array, Array, Array]]:
            layers, adam = carry
            (cost, (error, worth)), gradient = jax.value_and_grad(loss, has_aux=True)(layers, *drawn)
            change, adam = optimizer.update(gradient, adam)
            layers = jax.tree.map(lambda old, by: old - lr * by, layers, change)
            return (layers, adam), (error, cost, worth)

        def piece(carry: Any, transitions: Any) -> tuple[Any, Any]:
            layers, adam, target, updates = carry
            # The target network does not change here, so its values are one large product instead of many small ones.
            following = values(target, transitions.following)
            (layers, adam), measured = jax.lax.scan(step, (layers, adam), (transitions, following))
            updates += length
            moves = updates % config.target_every == 0
            target = jax.tree.map(
                lambda new, old: jnp.where(moves, config.tau * new + (1 - config.tau) * old, old), layers, target
            )
            return (layers, adam, target, updates), measured

        # The target network changes only between pieces.
        length = math.gcd(config.block_steps, config.target_every)
        pieces = jax.tree.map(lambda x: x.reshape(-1, length, *x.shape[1:]), transitions)
        # Layers, not the flat vector: splitting it and joining its gradient costs a fifth of a large step.
        start = (network.layers(params), adam, network.layers(target), updates)
        (layers, adam, target_layers, _), (errors, costs, worths) = jax.lax.scan(piece, start, pieces)
        params = _flat(layers)
        measures = {"train/loss": costs.mean(), "train/q_mean": worths.mean(), "finite": jnp.isfinite(params).all()}
        return params, _flat(target_layers), adam, errors.reshape(-1, errors.shape[-1]), measures

    return update


def _pick(values: Array, actions: Array) -> Array:
    """Pick the values (...) of actions (...) from the values of all actions (..., n)."""
    return jnp.take_along_axis(values, actions[..., None], axis=-1)[..., 0]


def _flat(layers: Layers) -> Array:
    return jnp.concatenate([part.ravel() for part in jax.tree.leaves(layers)])
