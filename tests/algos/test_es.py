"""Evolution strategies: the maths of one generation, and learning where the answer is known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import engines
from shoal.algos import es
from shoal.base import seeding
from shoal.envs.make import EnvSpec
from shoal.errors import LearningFault, UsageError
from shoal.policies.actions import Bins, Categorical, Gaussian, Point
from shoal.policies.policy import Policy
from shoal.sampling import noise_table
from shoal.sampling.evaluation import evaluate_policy
from tests.support.policies import saved_policy

SMALL = {"population": 12, "tasks": 3, "width": 4, "table_size": 10_000, "score_episodes": 2}
WALK = es.Config(**SMALL, hidden=(4,), normalise=True, length_factor=2.0)


def steps(
    config: es.Config, env: str, count: int, engine: str = "serial", seed: int = 0, workers: int | None = None
) -> list[Any]:
    found = []
    with engines.make(engine, workers) as pool:
        for step in es.train(config, EnvSpec(env), pool, seed, 10**6):
            found.append(step)
            if len(found) == count:
                return found
    raise AssertionError


def params_of(step: Any) -> np.ndarray:
    return np.asarray(step.learned["policy"]["params"])


def bowl_score(params: np.ndarray) -> float:
    """What a policy of the bowl scores: two weights and two biases, and 1 is seen."""
    action = params[:2] + params[2:]
    return float(-((action - [0.5, -1.0]) ** 2).sum())


@pytest.mark.parametrize("shaping", ["raw", "ranks", "standard", "utilities"])
def test_a_generation_as_computed_by_hand(shaping: Any) -> None:
    config = es.Config(**SMALL, sigma=0.2, lr=0.1, shaping=shaping, optimizer="sgd", momentum=0.0, weight_decay=0.5)
    policy = Policy((1,), "<f4", Point((2,), (-9.0, -9.0), (9.0, 9.0), "<f4"), ())
    before = policy.init(seeding.rng(0, "weights")).astype(np.float64)
    table = noise_table.open_table(0, 10_000).astype(np.float64)
    places = seeding.rng(0, "direction", 1).integers(0, 10_000 - 4, 6, endpoint=True)
    directions = [table[place : place + 4] for place in places]
    scores = np.array([bowl_score(before + sign * 0.2 * d) for d in directions for sign in (1, -1)])
    order = scores.argsort().argsort()
    utilities = np.maximum(0, np.log(7) - np.log(12 - order))
    worth = {
        "raw": scores,
        "ranks": order / 11 - 0.5,
        "standard": (scores - scores.mean()) / scores.std(),
        "utilities": utilities / utilities.sum() - 1 / 12,
    }[shaping]
    gradient = sum((worth[2 * i] - worth[2 * i + 1]) * d for i, d in enumerate(directions)) / (12 * 0.2)
    expected = before * (1 - 0.1 * 0.5) + 0.1 * gradient
    (step,) = steps(config, "tests.support.toys:Bowl-v0", 1)
    np.testing.assert_allclose(params_of(step), expected, rtol=1e-4, atol=1e-5)
    assert step.metrics["eval/mean_reward"] == pytest.approx(bowl_score(before), rel=1e-4)
    assert step.metrics["time/total_timesteps"] == 14, "the score of the policy itself costs steps too"


def test_the_estimate_comes_near_the_gradient() -> None:
    config = es.Config(population=2000, sigma=0.1, lr=1.0, shaping="raw", optimizer="sgd", momentum=0.0, width=64)
    policy = Policy((1,), "<f4", Point((2,), (-9.0, -9.0), (9.0, 9.0), "<f4"), ())
    before = policy.init(seeding.rng(0, "weights"))
    (step,) = steps(config, "tests.support.toys:Bowl-v0", 1)
    off = before[:2] + before[2:] - [0.5, -1.0]
    np.testing.assert_allclose(params_of(step) - before, np.tile(-2 * off, 2), atol=0.35)


def test_optimizers_as_computed_by_hand() -> None:
    gradients = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for name in ("adam", "sgd"):
        config = es.Config(optimizer=name, momentum=0.8)  # type: ignore[arg-type]
        kept: Any = {slot: np.zeros(3, np.float32) for slot in es.SLOTS[name]}
        mean = square = speed = np.zeros(3)
        for number, gradient in enumerate(gradients.astype(np.float64), start=1):
            kept, step = es.ascend(config, kept, gradient.astype(np.float32), number)
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            speed = 0.8 * speed + 0.2 * gradient
            adam = mean / (1 - 0.9**number) / (np.sqrt(square / (1 - 0.999**number)) + 1e-8)
            np.testing.assert_allclose(step, adam if name == "adam" else speed, rtol=1e-4)


def test_equal_scores_count_the_same() -> None:
    scores = np.array([3.0, 1.0, 3.0, 0.0])
    assert es.shaped("ranks", scores).tolist() == pytest.approx([1 / 3, -1 / 6, 1 / 3, -1 / 2])
    for name in ("ranks", "standard"):
        assert np.abs(es.shaped(name, np.ones(4))).max() == 0
    utilities = es.shaped("utilities", scores)
    assert utilities[0] == utilities[2] > utilities[1]
    assert utilities.sum() == pytest.approx(0)


def test_sigma_and_learning_rate_decay() -> None:
    config = es.Config(**SMALL, sigma=0.4, sigma_decay=0.5, sigma_min=0.15, lr=0.1, lr_decay=0.5)
    found = steps(config, "tests.support.toys:Bowl-v0", 3)
    assert [step.metrics["train/sigma"] for step in found] == [0.4, 0.2, 0.15]
    assert [step.metrics["train/learning_rate"] for step in found] == [0.1, 0.05, 0.025]


@pytest.mark.trains
def test_finds_the_bottom_of_the_bowl_and_learns_to_aim() -> None:
    config = es.Config(population=32, sigma=0.1, lr=0.1, lr_decay=0.97)
    assert steps(config, "tests.support.toys:Bowl-v0", 80)[-1].metrics["eval/mean_reward"] > -1e-3
    config = es.Config(population=32, sigma=0.1, lr=0.05, hidden=(4,), normalise=True, bins=9)
    found = steps(config, "tests.support.toys:Aim-v0", 50)
    assert found[0].metrics["eval/mean_reward"] < -2
    assert found[-1].metrics["eval/mean_reward"] > -1


RECALL: Any = {"population": 48, "episodes": 8, "sigma": 0.4, "lr": 0.2, "hidden": (6,), "environments": "all"}


@pytest.mark.trains
@pytest.mark.parametrize("memory", ["elman", "lstm"])
def test_memory_learns_what_is_shown_once(memory: Any) -> None:
    config = es.Config(**RECALL, memory=memory)
    found = steps(config, "tests.support.toys:Recall-v0", 25)
    with engines.make("serial") as engine:  # the saved policy remembers too
        assert evaluate_policy(engine, found[-1].policy, 64).returns.mean() > 3.5
    saved = Policy.from_record(found[-1].policy.policy.to_record())
    assert saved == found[-1].policy.policy
    assert saved.remembered == (12 if memory == "lstm" else 6)


@pytest.mark.trains
def test_without_memory_it_cannot() -> None:
    policy = steps(es.Config(**RECALL), "tests.support.toys:Recall-v0", 25)[-1].policy
    with engines.make("serial") as engine:
        assert evaluate_policy(engine, policy, 64).returns.mean() < 2.8


def test_statistics_are_of_all_that_was_seen() -> None:
    first, second = steps(WALK, "tests.support.toys:Walk-v0", 2)
    assert first.learned["moments"]["count"] == first.metrics["time/total_timesteps"]
    assert second.learned["moments"]["count"] == second.metrics["time/total_timesteps"]
    assert (np.abs(second.policy.weights["mean"]) > 0.01).all()
    assert second.learned["mean_length"] != first.learned["mean_length"]


@pytest.mark.parametrize(
    ("change", "same"),
    [({"tasks": 2}, True), ({"width": 2}, True), ({"environments": "all"}, False), ({"fixed_seeds": True}, False)],
    ids=str,
)
def test_what_a_generation_depends_on(change: Any, same: bool) -> None:
    """Members do not feel each other, so cutting a generation otherwise changes nothing here but statistics."""
    plain = es.Config(**SMALL)
    changed = es.Config(**SMALL | change)
    one, other = (params_of(steps(config, "tests.support.toys:Walk-v0", 2)[-1]) for config in (plain, changed))
    assert np.array_equal(one, other) == same


@pytest.mark.parametrize(("environments", "groups"), [("pair", 6), ("all", 1), ("independent", 12)])
def test_who_plays_in_equal_environments(environments: Any, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that are all the same score the same if, and only if, their environments are."""
    seen: list[np.ndarray] = []
    monkeypatch.setattr(es, "shaped", lambda name, scores: seen.append(scores) or scores)
    steps(es.Config(**SMALL | {"sigma": 1e-9}, environments=environments), "tests.support.toys:Walk-v0", 1)
    assert len(np.unique(seen[0])) == groups
    if environments == "pair":
        np.testing.assert_array_equal(seen[0][0::2], seen[0][1::2])


def test_fixed_seeds_are_the_same_in_every_generation() -> None:
    still = {"sigma": 1e-9, "lr": 1e-9, "score_episodes": 0, "environments": "independent"}
    for fixed in (True, False):
        config = es.Config(**SMALL | still, fixed_seeds=fixed)
        first, second = steps(config, "tests.support.toys:Walk-v0", 2)
        assert (first.metrics["rollout/fitness_mean"] == second.metrics["rollout/fitness_mean"]) == fixed
        assert "eval/mean_reward" not in first.metrics


def test_starts_from_a_saved_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    saved = saved_policy(path, Gaussian((2,), (-1.0, -1.0), (1.0, 1.0), "<f4"))
    still = {"sigma": 1e-9, "lr": 1e-9}
    config = es.Config(**SMALL | still, hidden=(4,), normalise=True, start=str(path))
    env = EnvSpec("tests.support.toys:Walk-v0", {"action": "box"})
    with engines.make("serial") as pool:
        step = next(es.train(config, env, pool, 0, 10**6))
    np.testing.assert_allclose(params_of(step), saved.weights["params"][:-2], atol=1e-6)
    np.testing.assert_allclose(step.policy.weights["mean"], saved.weights["mean"], atol=0.01)
    np.testing.assert_allclose(step.policy.weights["scale"], saved.weights["scale"], atol=0.02)


def test_a_saved_policy_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    saved_policy(path, Categorical((3,), (0,), scalar=True))
    config = es.Config(**SMALL, hidden=(4, 4), activation="relu", start=str(path))
    with pytest.raises(UsageError, match=r"hidden 4 there, 4 4 here; activation tanh there, relu here; normalise True"):
        steps(config, "tests.support.toys:Walk-v0", 1)
    config = es.Config(**SMALL, hidden=(4,), normalise=True, start=str(path))
    with engines.make("serial") as pool:
        with pytest.raises(UsageError, match=r"actions: .*Categorical"):
            next(es.train(config, EnvSpec("tests.support.toys:Walk-v0", {"action": "multi"}), pool, 0, 10**6))


def test_bins() -> None:
    distribution = Bins((3, 3), (0, 0), False, (2,), (-1.0, 0.0), (1.0, 4.0), "<f4")
    actions = distribution.sample(np.array([[0.0, 1, 0, 5, 0, 0]], np.float32), np.zeros(0), None)
    (action,) = distribution.to_env(actions)
    assert action.tolist() == [0.0, 0.0]
    assert action.dtype == np.float32
    assert distribution.to_env(np.array([[0, 2], [2, 1]]))[1].tolist() == [1.0, 2.0]
    with pytest.raises(UsageError, match="are discrete already"):
        steps(es.Config(**SMALL, bins=3), "tests.support.toys:Walk-v0", 1)


def test_outputs_of_tanh_are_stretched_to_the_bounds() -> None:
    distribution = Point((2,), (-1.0, 0.0), (3.0, 4.0), "<f4", scaled=True)
    assert np.array(distribution.to_env(np.array([[-1, -1], [0, 0], [1, 9]], np.float32))).tolist() == [
        [-1, 0],
        [1, 2],
        [3, 4],
    ]
    plain = Point((2,), (-1.0, 0.0), (3.0, 4.0), "<f4")
    assert plain.to_env(np.array([[-2.0, 2.0]], np.float32))[0].tolist() == [-1, 2]


def test_numbers_that_are_not_finite_are_not_kept() -> None:
    config = es.Config(**SMALL, shaping="raw", optimizer="sgd", momentum=0.0, lr=3e38)
    with pytest.raises(LearningFault, match=r"not finite.*not kept.*--lr"):
        steps(config, "tests.support.toys:Bowl-v0", 1)


def test_every_problem_is_listed() -> None:
    config = es.Config(
        population=7, episodes=0, min_steps=-1, length_factor=0.5, tasks=0, hidden=(), memory="lstm", bins=1, sigma=0.0,
        lr=-1.0, momentum=2.0, table_size=0,
    )  # fmt: skip
    assert len(config.problems()) == 11
    assert len(es.Config(sigma=np.inf, lr=np.inf, sigma_decay=2.0, length_factor=1.0).problems()) == 4
    assert len(es.Config(momentum=1.0, sigma=0.1, sigma_min=0.2).problems()) == 2
    assert es.Config().problems() == []
    with pytest.raises(UsageError, match=r"table_size must be at least 12"):
        steps(es.Config(**SMALL | {"table_size": 11}), "tests.support.toys:Walk-v0", 1)
