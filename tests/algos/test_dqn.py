"""DQN: the maths of one block of updates, values where the answer is known, and acting while learning."""

import dataclasses
import functools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shoal import engines
from shoal.algos import dqn
from shoal.algos.base import Step
from shoal.base.trees import digest
from shoal.engines.serial import SerialEngine
from shoal.envs.make import EnvSpec
from shoal.errors import LearningFault, UsageError
from shoal.learning import xla
from shoal.learning.replay_buffer import ReplayBuffer, Transitions
from shoal.policies.actions import EpsilonGreedy
from shoal.policies.policy import Policy
from shoal.runs.folder import RunDir
from shoal.sampling.tasks import fragment
from tests.support.cli import shoal
from tests.support.toys import Chain

pytestmark = pytest.mark.trains

xla.start(1)

SMALL = dqn.Config(
    batch_steps=64, lanes=2, width=4, hidden=(16,), learning_starts=100, minibatch=16, buffer_size=400, n_step=3,
    epsilon_steps=400, target_every=24,
)  # fmt: skip
WALK = "tests.support.toys:Walk-v0"


def steps(config: dqn.Config, env: str, count: int, engine: str = "serial", seed: int = 0, **options: Any) -> Any:
    found: list[Step] = []
    with engines.make(engine, **options) as pool:
        for step in dqn.train(config, EnvSpec(env), pool, seed, 10_000):
            found.append(step)
            if len(found) == count:
                return found
    raise AssertionError


# Learning where the answer is known --------------------------------------------------------------------------------


def chain_values(gamma: float) -> np.ndarray:
    """The best values of the chain's places and actions (5, 2), by value iteration."""
    values = np.zeros((5, 2))
    for _ in range(200):
        for place in range(5):
            for action in range(2):
                following, reward, over = Chain.outcome(place, action)
                values[place, action] = reward + gamma * (0.0 if over else values[following].max())
    return values


EVERYTHING = {"dueling": True, "priority": 0.6, "priority_weight": 1.0, "double": False, "tau": 0.2, "target_every": 8}


@pytest.mark.parametrize("change", [{}, EVERYTHING], ids=["plain", "options"])
def test_values_are_those_of_the_chain(change: dict[str, Any]) -> None:
    plain = dqn.Config(
        batch_steps=256, lanes=2, width=4, hidden=(32,), lr=3e-3, lr_schedule="linear", gamma=0.8, epsilon=1.0,
        learning_starts=256, replay_ratio=1.0, target_every=64, loss="squared",
    )  # fmt: skip
    last = steps(dataclasses.replace(plain, **change), "tests.support.toys:Chain-v0", 30)[-1]
    saved = last.policy
    found = saved.policy.out(saved.weights["params"], np.eye(5, dtype=np.float32))
    np.testing.assert_allclose(found, chain_values(0.8), atol=0.03)


# The same bits ----------------------------------------------------------------------------------------------------


def test_lag_is_one_round_of_samples() -> None:
    for lag, seen in ((0, [64, 128, 192, 256]), (1, [0, 64, 128, 192])):
        found = steps(dataclasses.replace(SMALL, lag=lag), WALK, 4)
        due = [max(0, int(0.5 * (count - 100))) for count in seen]
        block = SMALL.block_steps
        assert [step.metrics["train/n_updates"] for step in found] == [number // block * block for number in due]


class Gated(SerialEngine):
    """Runs fragments in a thread, each only once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.pool = ThreadPoolExecutor(1)

    def submit(self, function: Any, /, *args: Any, key: Any = None) -> "Future[Any]":
        if function is not fragment:
            return super().submit(function, *args, key=key)
        return self.pool.submit(self._later, args)

    def _later(self, args: Any) -> Any:
        assert self.gate.wait(20), "nobody learned while this round was waited for"
        return super().submit(fragment, *args).result()


@pytest.fixture
def gated() -> Iterator[Gated]:
    with Gated() as engine:
        yield engine
        engine.pool.shutdown()


def test_learns_while_workers_act(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = ReplayBuffer.draw
    monkeypatch.setattr(ReplayBuffer, "draw", lambda *args: (gated.gate.set(), draw(*args))[1])
    run = dqn.train(dataclasses.replace(SMALL, lag=1), EnvSpec(WALK), gated, 0, 10_000)
    for _ in range(4):
        next(run)
    gated.gate.clear()  # from here on no fragment is run before the learner has begun
    last = next(run)
    assert gated.gate.is_set()
    assert last.metrics["time/overlap_seconds"] > 0
    expected = steps(dataclasses.replace(SMALL, lag=1), WALK, 5)[-1]
    assert digest(last.learned) == digest(expected.learned)


# The maths of a block ---------------------------------------------------------------------------------------------

POLICY = Policy((3,), "<f4", EpsilonGreedy((3,), (0,), scalar=True), (8,), "relu")
PARAMS, OTHER = np.random.default_rng(0).normal(size=(2, POLICY.network.count)).astype(np.float32)


def transitions(count: int, batch: int = 6) -> Transitions:
    rng = np.random.default_rng(0)
    discounts = rng.choice(np.array([0.0, 0.9, 0.81], np.float32), (count, batch))
    return Transitions(
        rng.normal(size=(count, batch, 3)).astype(np.float32),
        rng.integers(0, 3, (count, batch)).astype(np.int32),
        rng.normal(size=(count, batch)).astype(np.float32) * 2,
        rng.normal(size=(count, batch, 3)).astype(np.float32),
        discounts,
        rng.uniform(0.5, 1, (count, batch)).astype(np.float32),
    )


def reference_errors(params: Any, target: Any, drawn: Transitions, double: bool) -> np.ndarray:
    """Errors of one minibatch, one transition at a time."""
    errors = []
    for i in range(len(drawn.actions)):
        worth = np.asarray(POLICY.out(params, drawn.observations[i]))[drawn.actions[i]]
        theirs = np.asarray(POLICY.out(target, drawn.following[i]))
        chooser = np.asarray(POLICY.out(params, drawn.following[i])) if double else theirs
        errors.append(worth - drawn.returns[i] - drawn.discounts[i] * theirs[int(chooser.argmax())])
    return np.array(errors)


def optimizer(config: dqn.Config) -> Any:
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam())


def block(config: dqn.Config, drawn: Transitions, updates: int = 0) -> Any:
    adam = optimizer(config).init(POLICY.network.layers(jnp.asarray(PARAMS)))
    step = jax.jit(dqn.make_update(config, POLICY, optimizer(config)))
    return step(PARAMS, OTHER, adam, drawn, np.int32(updates), np.float32(config.lr))


def settings(count: int, **change: Any) -> dqn.Config:
    return dqn.Config(block=count, replay_ratio=1.0, minibatch=6, **change)


@pytest.mark.parametrize("double", [True, False])
def test_errors_one_by_one(double: bool) -> None:
    drawn = transitions(1, batch=40)
    errors = np.asarray(block(settings(1, double=double), drawn)[3])[0]
    first = Transitions(*(array[0] for array in drawn))
    np.testing.assert_allclose(errors, reference_errors(PARAMS, OTHER, first, double), rtol=1e-4, atol=1e-5)
    other = reference_errors(PARAMS, OTHER, first, not double)
    assert np.abs(errors - other).max() > 0.01, "the two choices differ here, so that this test can tell them apart"


@pytest.mark.parametrize("kind", ["huber", "squared"])
def test_one_step_against_a_reference(kind: Any) -> None:
    config = settings(1, loss=kind, lr=1e-3, max_grad_norm=0.1)
    drawn = transitions(1)
    first = Transitions(*(array[0] for array in drawn))
    fixed = reference_errors(PARAMS, OTHER, first, double=True)
    values = np.asarray(POLICY.out(PARAMS, first.observations))
    aims = values[np.arange(6), first.actions] - fixed

    def cost(params: Any) -> Any:
        error = POLICY.out(params, jnp.asarray(first.observations))[jnp.arange(6), first.actions] - aims
        small = jnp.abs(error) <= 1
        each = jnp.where(small, 0.5 * error**2, jnp.abs(error) - 0.5) if kind == "huber" else error**2
        return (first.weights * each).sum() / 6

    params, *_, measures = block(config, drawn)
    g = np.asarray(jax.grad(cost)(jnp.asarray(PARAMS)), np.float64)
    assert np.linalg.norm(g) > 0.1, "it is shortened"
    g *= 0.1 / np.linalg.norm(g)
    expected = -config.lr * g / (np.abs(g) + 1e-8)  # Adam's first step
    clear = np.abs(g) > 1e-5  # where rounding does not decide the sign
    np.testing.assert_allclose((np.asarray(params) - PARAMS)[clear], expected[clear], rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(measures["train/loss"], cost(jnp.asarray(PARAMS)), rtol=1e-5)


@pytest.mark.parametrize(("every", "tau"), [(4, 1.0), (1, 0.3)])
def test_target_moves_when_it_should(every: int, tau: float) -> None:
    """A block of six against six blocks of one, with the target moved by hand."""
    drawn = transitions(6)
    params, target, adam, errors, _ = block(settings(6, target_every=every, tau=tau), drawn, updates=18)
    single = settings(1, target_every=10**6)
    step = jax.jit(dqn.make_update(single, POLICY, optimizer(single)))
    p, t = jnp.asarray(PARAMS), jnp.asarray(OTHER)
    a = optimizer(single).init(POLICY.network.layers(p))
    moved = 0
    for i in range(6):
        one = Transitions(*(array[i : i + 1] for array in drawn))
        p, _, a, e, _ = step(p, t, a, one, np.int32(0), np.float32(single.lr))
        np.testing.assert_allclose(e[0], errors[i], rtol=1e-4, atol=1e-5)
        if (18 + i + 1) % every == 0:
            t, moved = tau * p + (1 - tau) * t, moved + 1
    assert moved == {4: 2, 1: 6}[every]
    np.testing.assert_allclose(params, p, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(target, t, rtol=1e-4, atol=1e-6)
    assert len(jax.tree.leaves(adam)) == len(jax.tree.leaves(a))


# Settings ---------------------------------------------------------------------------------------------------------


def test_exploration_falls_and_is_spread() -> None:
    config = dqn.Config(epsilon_start=0.9, epsilon=0.1, epsilon_steps=1000, learning_starts=100, lanes=2, width=2)
    assert config.exploration(99) == 1.0, "random until learning starts"
    np.testing.assert_allclose([config.exploration(n) for n in (100, 500, 1000, 5000)], [0.82, 0.5, 0.1, 0.1])
    assert config.epsilons(0.4).tolist() == np.full((2, 2), 0.4, np.float32).tolist()
    spread = dataclasses.replace(config, ladder=7.0).epsilons(0.4)
    np.testing.assert_allclose(spread, 0.4 ** np.array([[1, 1 + 7 / 3], [1 + 14 / 3, 8]]), rtol=1e-5)


def test_slots_act_with_their_own_epsilon() -> None:
    weights = {"params": PARAMS, "mean": np.zeros(3, np.float32), "scale": np.ones(3, np.float32)}
    weights["epsilon"] = np.array([[0.0, 1.0], [0.25, 0.25]], np.float32)
    observations = np.tile(np.array([[1, 2, 3]], np.float32), (2, 1))
    noise = POLICY.distribution.noise(np.random.default_rng(0), 4000, 2)
    best = int(POLICY.out(PARAMS, observations)[0].argmax())
    nothing = np.zeros((2, 0), np.float32)  # such policies remember nothing
    first, second, third = (functools.partial(POLICY.actor(weights, lane), memory=nothing) for lane in (0, 1, 2))
    actions = np.stack([first(observations, row) for row in noise])[..., 0]
    assert (actions[:, 0] == best).all()
    np.testing.assert_allclose(np.bincount(actions[:, 1]) / 4000, 1 / 3, atol=0.03)
    actions = np.stack([second(observations, row) for row in noise])[..., 0]
    np.testing.assert_allclose((actions == best).mean(axis=0), 0.75 + 0.25 / 3, atol=0.02)
    assert (second(observations, None) == best).all(), "greedy without noise"
    np.testing.assert_array_equal(third(observations, noise[0]), first(observations, noise[0]))


def test_numbers_that_are_not_finite_are_not_kept() -> None:
    with pytest.raises(LearningFault, match=r"not finite.*not kept.*--lr"):
        steps(dataclasses.replace(SMALL, lr=1e38), WALK, 6)


@pytest.mark.parametrize("action", ["box", "multi"])
def test_other_action_spaces_are_refused(action: str) -> None:
    with engines.make("serial") as pool, pytest.raises(UsageError, match=r"Discrete.*has another one.*shoal train ppo"):
        next(dqn.train(SMALL, EnvSpec(WALK, {"action": action}), pool, 0, 100))


def test_every_problem_is_listed() -> None:
    config = dqn.Config(lanes=0, gamma=2.0, hidden=(0,), lr=-1, tau=0.0, priority=-1, lag=2, replay_ratio=0)  # type: ignore[arg-type]
    assert len(config.problems()) == 8
    assert len(dqn.Config(buffer_size=10).problems()) == 1
    assert len(dqn.Config(hidden=(), dueling=True).problems()) == 1
    assert dqn.Config().problems() == []


# As a user meets it -----------------------------------------------------------------------------------------------

FLAGS = ["--batch-steps=64", "--learning-starts=100", "--hidden", "8", "--buffer-size=400", "--n-step=2"]


@pytest.mark.slow
def test_train_evaluate_resume(tmp_path: Path) -> None:
    words = ["train", "dqn", WALK, *FLAGS, "--workers=2", "--dueling", "--priority=0.6"]
    code, out, err = shoal(*words, "--iterations=5", "--name=part", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert re.search(r"info: the replay buffer of 400 steps takes [\d.]+ MiB \(21 bytes a step\)", out)
    lines = RunDir(tmp_path / "runs/part").metrics()
    for name in ("rollout/exploration_rate", "rollout/ep_rew_mean", "train/loss", "train/n_updates", "time/fps"):
        assert isinstance(lines[-1][name], float | int)
    code, out, _ = shoal("evaluate", "part", "--episodes=10", "--json", cwd=tmp_path)
    assert code == 0
    assert out == shoal("evaluate", "part", "--episodes=10", "--json", "--engine=serial", cwd=tmp_path)[1]
    assert out != shoal("evaluate", "part", "--episodes=10", "--json", "--sample", cwd=tmp_path)[1]
    shoal("resume", "part", "--iterations=8", "--engine=serial", cwd=tmp_path)
    shoal(*words, "--iterations=8", "--name=whole", cwd=tmp_path)
    digests = [[line["digest"] for line in RunDir(tmp_path / f"runs/{name}").metrics()] for name in ("part", "whole")]
    assert len(digests[0]) == 8
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_verify_with_killed_workers(tmp_path: Path) -> None:
    words = ["--engines=serial,processes:2", "--kill-workers", "--iterations=6", "--lag=1"]
    code, out, err = shoal("verify", "dqn", WALK, *FLAGS, *words, cwd=tmp_path)
    assert code == 0, out + err
    assert "Equal: all 3 ways" in out


@pytest.mark.processes
def test_buffer_that_does_not_fit(tmp_path: Path) -> None:
    code, _, err = shoal("train", "dqn", WALK, "--buffer-size=1_000_000_000_000", cwd=tmp_path)
    assert code == 2
    assert re.search(r"1,000,000,000,000 steps takes [\d,.]+ GiB.*but this machine has.*--buffer-size \d+", err)
    assert "Traceback" not in err
