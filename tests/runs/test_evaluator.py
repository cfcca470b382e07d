"""Evaluation during training, and metrics from `info`: what they report, and that they change no digest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.errors import EnvironmentFault, UsageError
from shoal.runs.settings import Settings
from shoal.sampling.scores import Infos
from tests.support.grid import GridWorld

SMALL: dict[str, Any] = {
    "batch_steps": 128, "lanes": 2, "width": 4, "hidden": (8,), "engine": "serial", "preset": False,
    "tensorboard": False,
}  # fmt: skip


class Shouting(GridWorld):
    """Reports words where a metric needs a number."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"distance": "far"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.processes
@pytest.mark.trains
def test_evaluations_are_reported_and_change_no_digest() -> None:
    plain = shoal.train("ppo", "CartPole-v1", iterations=8, **SMALL)
    with pytest.raises(UsageError, match="no best policy"):
        _ = plain.best
    run = shoal.train("ppo", "CartPole-v1", iterations=8, eval_every=300, eval_episodes=5, name="evaluated", **SMALL)
    assert [row["digest"] for row in run.metrics] == [row["digest"] for row in plain.metrics]

    means = {row["iteration"]: row["eval/mean_reward"] for row in run.metrics if "eval/mean_reward" in row}
    assert list(means) == [3, 5, 8], "the first iterations with at least 300, 600 and 900 steps"
    best = max(means, key=lambda iteration: (means[iteration], -iteration))
    policies = {}
    settings = SMALL | {"eval_every": 300, "eval_episodes": 5}
    for iteration, step in zip(range(1, 9), shoal.iterate("ppo", "CartPole-v1", **settings), strict=False):
        assert step.metrics.get("eval/mean_reward") == means.get(iteration), "iterate evaluates in the same way"
        policies[iteration] = step.policy.saved.weights["params"]
    np.testing.assert_array_equal(run.best.saved.weights["params"], policies[best])
    assert len(set(means.values())) > 1, "or this could not tell the best from the last"


@pytest.mark.processes
@pytest.mark.trains
def test_evaluations_are_the_same_after_a_resume_and_on_other_engines() -> None:
    settings = SMALL | {"eval_every": 256, "eval_episodes": 3, "lag": 1}
    whole = shoal.train("ppo", "CartPole-v1", iterations=6, **settings | {"engine": "processes", "workers": 2})
    parts = shoal.train("ppo", "CartPole-v1", iterations=3, name="parts", **settings)
    parts.resume(iterations=6)
    results = [[row.get("eval/mean_reward") for row in run.metrics] for run in (whole, parts)]
    assert results[0] == results[1]
    assert [value is not None for value in results[0]] == [False, True] * 3
    np.testing.assert_array_equal(whole.best.saved.weights["params"], parts.best.saved.weights["params"])


@pytest.mark.processes
@pytest.mark.trains
def test_infos_become_metrics() -> None:
    settings = SMALL | {"info_keys": ["distance"], "eval_every": 256, "eval_episodes": 4}
    run = shoal.train("ppo", GridWorld, iterations=4, **settings)
    plain = shoal.train("ppo", GridWorld, iterations=4, name="plain", **SMALL)
    assert run.digest == plain.digest
    last = run.metrics[-1]
    for section in ("rollout", "eval"):
        assert 0 <= last[f"{section}/distance"] <= 4  # type: ignore[literal-required]
        assert 0 <= last[f"{section}/success_rate"] <= 1  # type: ignore[literal-required]
    assert "rollout/distance" not in plain.metrics[-1]
    assert plain.metrics[-1]["rollout/success_rate"] == last["rollout/success_rate"]
    parts = shoal.train("ppo", GridWorld, iterations=2, name="parts", **settings)
    parts.resume(iterations=4)
    assert parts.metrics[-1]["rollout/distance"] == last["rollout/distance"]  # type: ignore[typeddict-item]
    with pytest.raises(EnvironmentFault, match=r"info\['distance'\] is 'far' at the end of an episode"):
        shoal.train("ppo", Shouting, iterations=2, **settings)


@pytest.mark.processes
@pytest.mark.trains
def test_infos_of_native_vector_environments() -> None:
    settings = SMALL | {"vector": "envpool", "info_keys": ("elapsed_step",)}
    last = shoal.train("ppo", "CartPole-v1", iterations=3, **settings).metrics[-1]
    assert last["rollout/elapsed_step"] == last["rollout/ep_len_mean"]  # type: ignore[typeddict-item]


def test_infos_cover_the_last_hundred_episodes_that_report_them() -> None:
    infos, nan = Infos(), float("nan")
    record: Any = {"infos": {"is_success": np.array([1.0, nan, 0.0]), "speed": np.array([2.0, 4.0, nan])}}
    infos.add([record, {}])
    assert infos.metrics() == {"rollout/success_rate": 0.5, "rollout/speed": 3.0}
    infos.add([{"infos": {"speed": np.full(99, 5.0)}}])  # type: ignore[typeddict-item]
    again = Infos(infos.state())
    assert infos.metrics() == again.metrics() == {"rollout/success_rate": 0.5, "rollout/speed": 4.99}


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(UsageError) as caught:
        shoal.iterate("es", "CartPole-v1", eval_every=100, eval_episodes=0, info_keys=["ep_rew_mean"])
    problems = "\n".join(caught.value.problems)
    for message in ("eval_episodes must be at least 1", "info_keys must not contain ep_rew_mean", "--score-episodes 0"):
        assert message in problems
    assert Settings("CartPole-v1").problems() == []
