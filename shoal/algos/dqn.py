"""Deep Q-learning (Mnih et al., 2015) that acts and learns at the same time, with double targets (van Hasselt, 2016).

Each iteration is a round: every slot takes a fixed number of steps with one set of weights, and gradient steps are
taken on minibatches from a replay buffer, as many as the replay ratio asks for. With a lag of 1 the learner does not
wait for the round: it learns from the rounds before while the workers act. With a lag of 0 the round comes first.
Either way what is learned from is fixed, so the result is the same on every engine.

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

from shoal.algos import Step
from shoal.base import seeding, validation
from shoal.base.memory import available_memory
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec, describe
from shoal.errors import LearningFault, UsageError
from shoal.learning.replay_buffer import Layout, ReplayBuffer
from shoal.policies import actions
from shoal.policies.actions import Categorical, EpsilonGreedy
from shoal.policies.policy import Policy, SavedPolicy
from shoal.sampling.lanes import Lanes
from shoal.sampling.scores import Scores


@dataclass(frozen=True)
class Config:
    """Settings of DQN."""

    batch_steps: int = 256
    """Environment steps per iteration (at least)."""
    lanes: int = 2
    """Groups of environments; at most this many workers are busy. Part of the result, unlike the number of workers."""
    width: int = 4
    """Environments in a lane, stepped together."""
    lag: Literal[0, 1] = 1
    """1: learn from the rounds before while a round is acted. 0: act, then learn, in turns."""
    gamma: float = 0.99
    """Discount per step."""
    n_step: int = 1
    """Steps of reward before the value of what follows counts."""
    hidden: tuple[int, ...] = (256, 256)
    """Hidden layers."""
    activation: Literal["tanh", "relu"] = "relu"
    """Hidden activation."""
    dueling: bool = False
    """Let the network compute the value of a situation and what each action has over the mean apart."""
    double: bool = True
    """Let the newest network choose the action whose value the target network gives."""
    lr: float = 1e-3
    """Adam's learning rate."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Whether the learning rate falls to zero at the run's last step."""
    loss: Literal["huber", "squared"] = "huber"
    """What an error costs: its square, or from 1 on its size."""
    max_grad_norm: float = 10.0
    """Longer gradients are shortened to this."""
    minibatch: int = 64
    """Transitions per gradient step."""
    replay_ratio: float = 0.5
    """Gradient steps per environment step."""
    block: int = 128
    """Gradient steps in one jitted call, at most; a call holds its minibatches in memory."""
    target_every: int = 128
    """Gradient steps between updates of the target network."""
    tau: float = 1.0
    """How far the target network moves to the newest one: 1 copies it; 0.005 with --target-every 1 follows slowly."""
    buffer_size: int = 100_000
    """Newest environment steps that are learned from."""
    learning_starts: int = 1000
    """Environment steps before the first gradient step; until then actions are random."""
    epsilon_start: float = 1.0
    """Share of random actions at first."""
    epsilon: float = 0.05
    """Share of random actions in the end."""
    epsilon_steps: int = 10_000
    """Environment steps in which it falls from the one to the other."""
    ladder: float = 0.0
    """Let slots explore unequally: from epsilon in the first to epsilon ** (1 + this) in the last (7 in Ape-X)."""
    priority: float = 0.0
    """Draw transitions in proportion to this power of their last error (0.6 is usual); 0 draws all alike."""
    priority_weight: float = 0.4
    """How far being drawn more often is made up for by a smaller weight: 0 not at all, 1 wholly."""

    @property
    def slots(self) -> int:
        """Environments in all."""
        return self.lanes * self.width

    @property
    def fragment_steps(self) -> int:
        """Steps of a fragment: the round divided over all slots."""
        return -(-self.batch_steps // self.slots)

    @property
    def block_steps(self) -> int:
        """Gradient steps in one jitted call: what a round asks for, if that is less than `block`."""
        return max(1, min(self.block, int(self.replay_ratio * self.fragment_steps * self.slots)))

    def exploration(self, steps: int) -> float:
        """Share of random actions in a round that begins after so many environment steps."""
        if steps < self.learning_starts:
            return 1.0
        done = min(1.0, steps / self.epsilon_steps) if self.epsilon_steps else 1.0
        return self.epsilon_start + done * (self.epsilon - self.epsilon_start)

    def epsilons(self, base: float) -> np.ndarray:
        """Share of random actions of each slot (lanes, width), float32."""
        place = np.arange(self.slots) / max(1, self.slots - 1)
        return (base ** (1 + self.ladder * place)).astype(np.float32).reshape(self.lanes, self.width)

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
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
    """Learn for ever, from the start or from a state; the schedule of the learning rate ends at `steps` steps."""
    spaces = engine.submit(describe, env.to_tree()).result()
    policy = Policy(
        tuple(spaces["shape"]), spaces["dtype"], _head(spaces["head"], env),
        config.hidden, config.activation, dueling=config.dueling,
    )  # fmt: skip
    layout = Layout(
        config.buffer_size, config.slots, config.fragment_steps, policy.observation_shape, policy.observation_dtype,
        prioritised=config.priority > 0,
    )  # fmt: skip
    layout.check(available_memory())
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam())
    update = jax.jit(make_update(config, policy, optimizer))

    state = state or {}
    params = state.get("policy", {}).get("params", policy.init(seeding.rng(seed, "weights")))
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
    unscaled = {"mean": np.zeros(policy.inputs, np.float32), "scale": np.ones(policy.inputs, np.float32)}

    while True:
        iteration += 1
        epsilon = config.exploration(scores.steps)
        lr = config.lr * (max(0.0, 1.0 - scores.steps / steps) if config.lr_schedule == "linear" else 1.0)
        acting = {"params": np.asarray(params), "epsilon": config.epsilons(epsilon)}
        asked = lanes.ask(engine.share(acting | unscaled), config.fragment_steps)
        if config.lag == 0:
            records = lanes.take(asked)
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
        learned_at = time.perf_counter()
        if learning.pop("finite", 1.0) < 1:
            raise LearningFault(
                f"iteration {iteration} computed weights that are not finite ({learning}); they were not kept. "
                f"Likely causes: rewards that are far too large, or a learning rate that is; "
                f"try --lr {config.lr / 10:g}"
            )

        if config.lag == 1:
            records = lanes.take(asked)
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
            "time/sample_seconds": asked.done - asked.begun,
            "time/learn_seconds": learned_at - begun,
            "time/overlap_seconds": max(0.0, min(learned_at, asked.done) - max(begun, asked.begun)),
        }
        rates = {
            "rollout/exploration_rate": epsilon,
            "train/learning_rate": lr,
            "train/n_updates": updates,
        }
        now = {"params": np.asarray(params), "epsilon": np.full((1, 1), epsilon, np.float32)}
        yield Step(
            metrics=scores.metrics() | {"time/iterations": iteration} | learning | rates | timing,
            learned=learned,
            state=lambda learned=learned, rest=rest: learned | {key: made() for key, made in rest.items()},  # type: ignore[misc]
            policy=SavedPolicy(policy, now | unscaled, env.to_tree()),
        )


def _head(tree: Tree, env: EnvSpec) -> EpsilonGreedy:
    """The head for an environment with one Discrete choice; refuses others."""
    head = actions.from_tree(tree)
    if not isinstance(head, Categorical) or not head.scalar:
        raise UsageError(
            f"dqn chooses one of a fixed number of actions (a Discrete space), and {env.id} takes others. "
            f"Use another algorithm: shoal train ppo {env.id}"
        )
    return EpsilonGreedy(head.choices, head.start, head.scalar)


def make_update(config: Config, policy: Policy, optimizer: Any) -> Callable[..., Any]:
    """One block of gradient steps as one function of arrays, for `jax.jit`.

    It takes parameters, target parameters, the optimizer's state, `Transitions` (steps, minibatch), the number of
    gradient steps before and the learning rate; it gives the first three anew, errors (steps, minibatch) and measures.
    """
    network = policy.network

    def values(layers: Any, observations: Any) -> Any:
        return network.apply(layers, policy.features(observations, None, None))

    def loss(layers: Any, drawn: Any, following: Any) -> Any:
        worth = values(layers, drawn.observations)
        chosen = _pick(worth, drawn.actions)
        best = (values(layers, drawn.following) if config.double else following).argmax(axis=-1)
        aim = drawn.returns + drawn.discounts * _pick(following, best)
        error = chosen - jax.lax.stop_gradient(aim)
        cost = optax.losses.huber_loss(error) if config.loss == "huber" else error**2
        return (drawn.weights * cost).mean(), (error, worth.mean())

    def update(params: Any, target: Any, adam: Any, transitions: Any, updates: Any, lr: Any) -> Any:
        def step(carry: Any, drawn: Any) -> Any:
            layers, adam = carry
            (cost, (error, worth)), gradient = jax.value_and_grad(loss, has_aux=True)(layers, *drawn)
            change, adam = optimizer.update(gradient, adam)
            layers = jax.tree.map(lambda old, by: old - lr * by, layers, change)
            return (layers, adam), (error, cost, worth)

        def piece(carry: Any, transitions: Any) -> Any:
            layers, adam, target, updates = carry
            # The target network stands still here, so its values are one large product instead of many small ones.
            following = values(target, transitions.following)
            (layers, adam), measured = jax.lax.scan(step, (layers, adam), (transitions, following))
            updates += length
            moves = updates % config.target_every == 0
            target = jax.tree.map(
                lambda new, old: jnp.where(moves, config.tau * new + (1 - config.tau) * old, old), layers, target
            )
            return (layers, adam, target, updates), measured

        # The target network moves only between pieces.
        length = math.gcd(config.block_steps, config.target_every)
        pieces = jax.tree.map(lambda x: x.reshape(-1, length, *x.shape[1:]), transitions)
        # Layers, not the flat vector: cutting it up and putting its gradient together costs a fifth of a large step.
        start = (network.layers(params), adam, network.layers(target), updates)
        (layers, adam, target_layers, _), (errors, costs, worths) = jax.lax.scan(piece, start, pieces)
        params = _flat(layers)
        measures = {"train/loss": costs.mean(), "train/q_mean": worths.mean(), "finite": jnp.isfinite(params).all()}
        return params, _flat(target_layers), adam, errors.reshape(-1, errors.shape[-1]), measures

    return update


def _pick(values: Any, actions: Any) -> Any:
    """Values (...) of actions (...) from values of all actions (..., n)."""
    return jnp.take_along_axis(values, actions[..., None], axis=-1)[..., 0]


def _flat(layers: Any) -> Any:
    return jnp.concatenate([part.ravel() for part in jax.tree.leaves(layers)])
