"""Nevergrad's optimizers: the same asks for the same tells, whatever they draw from."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import engines
from shoal.algos import nevergrad
from shoal.algos.nevergrad import Config, Searcher, family, registry, too_large
from shoal.base.trees import digest
from shoal.envs.make import EnvSpec
from shoal.errors import CheckpointFault, UsageError
from shoal.policies.actions import Categorical
from tests.support.policies import saved_policy

pytestmark = pytest.mark.trains

SMALL: Any = {"population": 8, "tasks": 2, "width": 4, "score_episodes": 2}


def steps(config: Config, env: str, count: int, engine: str = "serial", **options: Any) -> list[Any]:
    found = []
    with engines.make(engine, **options) as pool:
        for step in nevergrad.train(config, EnvSpec(env), pool, 0, 10**6):
            found.append(step)
            if len(found) == count:
                return found
    raise AssertionError


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", ["CMA", "DE", "PSO", "OnePlusOne"])
def test_same_bits_on_every_engine_and_after_a_resume(optimizer: str) -> None:
    config = Config(**SMALL, optimizer=optimizer, hidden=(3,))
    whole = steps(config, "tests.support.toys:Walk-v0", 5)
    one = [digest(step.learned) for step in whole]
    again = [digest(step.learned) for step in steps(config, "tests.support.toys:Walk-v0", 3, "processes", workers=3)]
    assert one[:3] == again
    with engines.make("serial") as pool:
        resumed = nevergrad.train(config, EnvSpec("tests.support.toys:Walk-v0"), pool, 0, 10**6, whole[2].state())
        assert [digest(next(resumed).state()) for _ in range(2)] == one[3:]


# Of every family some, among them many that draw from the process's own generators.
@pytest.mark.parametrize(
    "optimizer",
    ["DiagonalCMA", "TwoPointsDE", "VoronoiDE", "NoisyOnePlusOne", "SmoothLognormalDiscreteOnePlusOne", "TBPSA", "cGA",
     "EDA", "NGOpt", "Shiwa", "CMAL", "MetaModel", "ScrHammersleySearch", "RandomSearch", "SplitCMA",
     "TripleCMA", "RecombiningGA"],
)  # fmt: skip
def test_asks_follow_from_the_seed_and_the_tells(optimizer: str) -> None:
    config = Config(population=6, optimizer=optimizer, budget=60)
    asked = []
    for other in (0, 1):
        np.random.seed(other)
        random.seed(other)
        searcher = Searcher(config, 3, np.zeros(4, np.float32))
        for _ in range(4):
            searcher.tell(((searcher.ask() - 0.3) ** 2).sum(axis=1))
        asked.append((searcher.asked, searcher.best.tolist()))
    assert asked[0] == asked[1]
    elsewhere = Searcher(config, 4, np.zeros(4, np.float32))
    elsewhere.ask()
    first = Searcher(config, 3, np.zeros(4, np.float32))
    first.ask()
    if optimizer not in ("cGA", "NGOpt", "Shiwa", "TripleCMA"):  # these begin with points that are the same for all
        assert elsewhere.asked != first.asked


@pytest.mark.parametrize(("environments", "groups"), [("all", 1), ("independent", 6)])
def test_who_plays_in_equal_environments(environments: Any, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that are all but the same score the same if, and only if, their environments are."""
    told: list[np.ndarray] = []
    monkeypatch.setattr(Searcher, "tell", lambda self, losses: told.append(losses))
    config = Config(population=6, sigma=1e-9, environments=environments)
    with engines.make("serial") as pool:
        next(nevergrad.train(config, EnvSpec("tests.support.toys:Walk-v0"), pool, 0, 10**6))
    assert len(np.unique(told[0])) == groups


def test_the_generators_of_the_process_are_left_alone() -> None:
    before = np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index, union-attr]
    searcher = Searcher(Config(population=4, optimizer="VoronoiDE"), 3, np.zeros(4, np.float32))
    searcher.tell(searcher.ask().sum(axis=1))
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before  # type: ignore[index, union-attr]


def test_the_population_is_what_nevergrad_takes_for_workers() -> None:
    searcher = Searcher(Config(population=24, optimizer="DE"), 3, np.zeros(4, np.float32))
    assert searcher._optimizer.num_workers == 24
    assert searcher.ask().shape == (24, 4)


def test_finds_the_bottom_of_the_bowl() -> None:
    found = steps(Config(population=12, score_episodes=1), "tests.support.toys:Bowl-v0", 30)
    assert found[0].metrics["eval/mean_reward"] < -1
    assert found[-1].metrics["eval/mean_reward"] > -1e-3
    assert found[-1].metrics["train/evaluations"] == 360


def test_a_search_that_begins_anew_does_not_forget() -> None:
    searcher = Searcher(Config(population=8, optimizer="CMA", sigma=0.1), 3, np.array([1.1, -2.3, 0.7], np.float32))
    tried, losses = list[float](), list[float]()
    for _ in range(150):
        found = np.maximum(np.linalg.norm(searcher.ask(), axis=1), 1.0)  # a flat bottom, on which CMA converges
        searcher.tell(found)
        tried.append(float(found.max()))
        losses.append(max(round(float(np.linalg.norm(searcher.best)), 12), 1.0))
    assert max(tried[-50:]) > 1, "it looks elsewhere again"
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 1


def test_starts_from_a_policy_with_statistics_and_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    saved = saved_policy(path, Categorical((3,), (0,), scalar=True))
    config = Config(**SMALL, hidden=(4,), start=str(path))
    step = steps(config, "tests.support.toys:Walk-v0", 1)[0]
    assert step.policy.policy == saved.policy
    np.testing.assert_array_equal(step.policy.weights["mean"], saved.weights["mean"])
    start = Searcher(config, 0, saved.weights["params"])
    np.testing.assert_array_equal(start.best.astype(np.float32), saved.weights["params"])
    assert np.abs(start.ask() - saved.weights["params"]).mean() < 1


def test_other_asks_on_replay_are_noticed() -> None:
    config = Config(**SMALL)
    state = steps(config, "tests.support.toys:Walk-v0", 3)[-1].state()
    state["told"] = state["told"] + np.eye(3, 8)
    with engines.make("serial") as pool:
        with pytest.raises(CheckpointFault, match="CMA proposed different weights"):
            next(nevergrad.train(config, EnvSpec("tests.support.toys:Walk-v0"), pool, 0, 10**6, state))


def test_what_cannot_be_used_is_refused() -> None:
    (problem,) = Config(optimizer="cma").problems()
    assert "Did you mean CMA?" in problem
    assert "shoal optimizers" in problem
    assert len(Config(optimizer="Nope", population=0, budget=0, sigma=0.0).problems()) == 4
    assert Config().problems() == []
    assert "--population 1" in Config(optimizer="NelderMead").problems()[0]
    assert Config(optimizer="NelderMead", population=1).problems() == []
    searcher = Searcher(Config(optimizer="HammersleySearch", population=2), 0, np.zeros(4, np.float32))
    with pytest.raises(UsageError, match=r"HammersleySearch raised.*--budget"):
        searcher.ask()


def test_without_nevergrad(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.cache_clear()
    monkeypatch.setitem(sys.modules, "nevergrad", None)
    assert "pip install 'shoal[nevergrad]'" in Config().problems()[0]


def test_families_and_their_limits() -> None:
    families = {name: family(name).name for name in registry()}
    assert len(families) > 500
    assert [families[name] for name in ("CMA", "DiagonalCMA", "DE", "PSO", "OnePlusOne", "NGOpt", "NelderMead")] == [
        "CMA", "diagonal CMA", "differential evolution", "particle swarms", "one plus one", "choosers", "classic",
    ]  # fmt: skip
    assert list(families.values()).count("others") < 20
    assert "5,000 weights" in too_large("CMA", 5000)
    assert not too_large("CMA", 50)
    assert not too_large("DiagonalCMA", 5000)
    for name in ("MultiCMA", "PolyCMA", "PymooCMAES"):
        assert "5,000 weights" in too_large(name, 5000)
    assert not too_large("NGOpt", 5000)


def test_what_does_not_fit_into_memory_is_refused() -> None:
    config = Config(hidden=(3000, 3000), optimizer="CMA")
    words = r"would need [\d,.]+ GiB of memory; [\d,.]+ GiB are available"
    with engines.make("serial") as pool, pytest.raises(UsageError, match=words):
        next(nevergrad.train(config, EnvSpec("tests.support.toys:Walk-v0"), pool, 0, 10**6))
