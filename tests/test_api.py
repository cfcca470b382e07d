"""Train, iterate and load from Python: the digests of the command line, without side effects on the caller."""

import functools
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from shoal.algos import ppo
from shoal.errors import CheckpointFault, EngineError, EnvironmentFault, TaskFailed, UsageError
from shoal.runs import run as runs
from shoal.runs.learner_process import LearnerProcess
from shoal.runs.metrics import MetricsRow
from tests.support.cli import ROOT
from tests.support.cli import shoal as command

FLAGS = {
    "ppo": "--batch-steps 128 --lanes 2 --width 4 --hidden 8 --seed 5",
    "trpo": "--batch-steps 128 --lanes 2 --width 4 --hidden 8",
    "dqn": "--batch-steps 64 --lanes 2 --width 4 --hidden 16 --learning-starts 128",
    "es": "--population 8 --width 4 --max-episode-steps 60",
    "nevergrad": "--population 8 --width 4 --max-episode-steps 60 --optimizer CMA",
}
SMALL: dict[str, Any] = {
    "batch_steps": 128,
    "lanes": 2,
    "width": 4,
    "hidden": (8,),
    "engine": "serial",
    "preset": False,
}
NOT_FINITE = "shoal.testing.environments:testing/NotFinite-v0"


def keywords(flags: str) -> dict[str, Any]:
    """Spell flags as keyword arguments."""
    pairs = re.findall(r"--(\S+) (\S+)", flags)
    values = {key.replace("-", "_"): int(value) if value.isdigit() else value for key, value in pairs}
    return values | ({"hidden": (values["hidden"],)} if "hidden" in values else {})


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Recorder:
    """A tracker that keeps what it receives."""

    def __init__(self, fail_at: int = 0) -> None:
        self.rows: list[MetricsRow] = []
        self.closed = 0
        self.fail_at = fail_at

    def write(self, metrics: MetricsRow) -> None:
        self.rows.append(metrics)
        if metrics["iteration"] == self.fail_at:
            raise ZeroDivisionError("in a tracker")

    def close(self) -> None:
        self.closed += 1


@pytest.mark.processes
@pytest.mark.parametrize(
    "algo", [algo if algo == "ppo" else pytest.param(algo, marks=pytest.mark.slow) for algo in FLAGS]
)
def test_the_digests_are_those_of_the_command_line(algo: str, tmp_path: Path) -> None:
    """Also in a process that has used JAX before, with all cores: there the run learns in a child process."""
    flags = f"{FLAGS[algo]} --iterations 3"
    code, out, err = command("train", algo, "CartPole-v1", "--no-preset", "--workers=2", *flags.split(), cwd=tmp_path)
    assert code == 0, err
    expected = re.findall(r"Digest: (\w+)", out)
    script = f"""
import jax, jax.numpy as jnp
USE_JAX and jnp.ones(3).sum()
import shoal
run = shoal.train({algo!r}, "CartPole-v1", preset=False, workers=2, **{keywords(flags)!r})
again = list(shoal.iterate({algo!r}, "CartPole-v1", preset=False, engine="serial", **{keywords(flags)!r}))
print("Digest:", run.digest)
print("Digest:", again[-1].metrics["digest"])
"""
    environment = {key: value for key, value in os.environ.items() if "THREADS" not in key and key != "NPROC"}
    for used in ("True", "False"):
        done = subprocess.run(
            [sys.executable, "-c", script.replace("USE_JAX", used)],
            capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)}, check=False, timeout=100,
        )  # fmt: skip
        assert re.findall(r"Digest: (\w+)", done.stdout) == expected * 2, done.stderr


@pytest.mark.processes
def test_a_run_from_start_to_resume() -> None:
    tracker = Recorder()
    run = shoal.train("ppo", "CartPole-v1", iterations=2, trackers=[tracker], name="first", **SMALL)
    assert [row["iteration"] for row in run.metrics] == [row["iteration"] for row in tracker.rows] == [1, 2]
    assert tracker.closed == 1
    evaluation = run.evaluate(episodes=3, engine="serial")
    assert len(evaluation.returns) == 3
    assert evaluation.mean == evaluation.returns.mean()
    assert run.resume(iterations=4) is run
    whole = shoal.train(ppo, "CartPole-v1", iterations=4, **SMALL)
    assert run.digest == whole.digest
    assert repr(run) == "Run('runs/first', 512 steps)"
    assert shoal.open_run("first").digest == run.digest

    observations = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    sources = (run, "first", "runs/first", run.path / "policy.safetensors", run.path / "checkpoints" / "000004")
    expected = run.policy.act(observations).tolist()
    for source in sources:
        policy = shoal.load(source)
        assert policy.act(observations).tolist() == expected
        assert [policy.act(observation) for observation in observations] == expected
    older = shoal.load(run.path / "checkpoints" / "000002")
    assert not np.array_equal(older.saved.weights["params"], run.policy.saved.weights["params"])


@pytest.mark.processes
def test_it_is_quiet_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    shoal.train("ppo", "CartPole-v1", iterations=1, **SMALL)
    assert capfd.readouterr() == ("", "")
    shoal.train("ppo", "CartPole-v1", iterations=1, progress=True, **SMALL)
    assert "ppo CartPole-v1" in capfd.readouterr().out


def test_every_mistake_is_reported_at_once_and_nothing_is_left() -> None:
    tracker = Recorder()
    mistakes: dict[str, Any] = {"learning_rat": 1, "epochs": "many", "seed": -1, "engine": "serial"}
    with pytest.raises(UsageError) as caught:
        shoal.train("ppo", "CartPole-v1", trackers=[tracker], **mistakes)
    assert len(caught.value.problems) == 2
    assert "no setting 'learning_rat'" in caught.value.problems[0]
    assert "epochs='many' does not fit: expected `int`, got `str`" in caught.value.problems[1]
    with pytest.raises(
        UsageError, match=r"seed must be in[\s\S]*no environment 'CartPol-v1'|no environment[\s\S]*seed"
    ):
        shoal.train("ppo", "CartPol-v1", seed=-1, engine="serial", trackers=[tracker])
    for wrong, message in (
        ({"lr": 1e-3, "learning_rate": 1e-3}, "are the same setting"),
        ({"n_envs": 7}, "not a multiple of the number of lanes"),
        ({"n_envs": 8, "width": 2}, "both set the width"),
        ({"env_kwargs": {"x": object()}}, "must hold plain values"),
        ({"device": "tpu"}, "device"),
        ({"hidden": (0,)}, "hidden must be at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            shoal.iterate("ppo", "CartPole-v1", preset=False, **wrong)
    assert tracker.closed == 2
    assert not Path("runs").exists()


def test_mistakes_of_calls_are_explained() -> None:
    class Unfinished:
        def write(self, metrics: MetricsRow) -> None: ...

    calls: list[tuple[Any, str]] = [
        (lambda: shoal.train("ppo", gymnasium.make("CartPole-v1")), "pass its id 'CartPole-v1'"),
        (lambda: shoal.train("PPO", "CartPole-v1"), "Did you mean ppo"),
        (lambda: shoal.train("ppo", functools.partial(gymnasium.make, "CartPole-v1")), "its arguments separately"),
        (lambda: shoal.train("ppo", "CartPole-v1", learning_rat=1), r"Did you mean lr\?"),
        (lambda: shoal.train("ppo", "CartPole-v1", ent_coef=1), r"Did you mean entropy\?"),
        (lambda: shoal.train("ppo", "CartPole-v1", total_timesteps=9, steps=8), "total_timesteps=9 and steps=8 are"),
        (lambda: shoal.train("ppo", "CartPole-v1", hidden=64), "expected a list, got `int`"),
        (lambda: shoal.train("ppo", "CartPole-v1", engine=3), "engine must be a name"),
        (lambda: shoal.train("ppo", "CartPole-v1", trackers=[print]), "write\\(metrics\\) and close"),
        (lambda: shoal.train("ppo", "CartPole-v1", trackers=[Unfinished()]), "write\\(metrics\\) and close"),  # type: ignore[list-item]
        (lambda: shoal.iterate("ppo", "CartPole-v1", trackers=[]), "iterate does not take trackers"),
    ]
    for call, message in calls:
        with pytest.raises(UsageError, match=message):
            call()
    assert not Path("runs").exists()


@pytest.mark.processes
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_a_gpu_that_is_missing_is_reported_and_nothing_is_left() -> None:
    for _ in range(2):  # the second time JAX is in use
        with pytest.raises(UsageError, match="device gpu: JAX finds no GPU here"):
            shoal.train("ppo", "CartPole-v1", iterations=1, **SMALL | {"device": "gpu"})
        assert list(Path("runs").iterdir()) == []
        shoal.train("ppo", "CartPole-v1", iterations=1, runs="others", **SMALL)


@pytest.mark.processes
def test_policies_of_iterations_are_saved_evaluated_and_started_from() -> None:
    step = next(shoal.iterate("ppo", "CartPole-v1", **SMALL))
    step.policy.save("early.safetensors")
    early = shoal.load("early.safetensors")
    assert early.act(np.ones(4)) == step.policy.act(np.ones(4))
    with shoal.engine("serial") as engine:
        found = [shoal.evaluate(policy, 4, engine=engine).returns.tolist() for policy in (early, step.policy)]
    assert found[0] == found[1]
    with pytest.raises(UsageError, match="episodes must be at least 1"):
        shoal.evaluate(early, 0, engine="serial")
    with pytest.raises(UsageError, match=r"ends in \.safetensors"):
        early.save("early.zip")
    run = shoal.train("ppo", "CartPole-v1", iterations=1, start="early.safetensors", **SMALL)
    again = shoal.train("ppo", "CartPole-v1", iterations=1, start=run, **SMALL)
    assert again.settings["start"] == str(run.path)
    with pytest.raises(UsageError, match=r"has taken 128 steps in 1 iterations already"):
        run.resume(steps=100)
    assert run.settings["steps"] == 100_000, "a goal that is behind is not recorded"
    early.export("export.safetensors")
    with pytest.raises(CheckpointFault, match=r"export\.safetensors"):
        shoal.train("ppo", "CartPole-v1", start="export.safetensors", name="none", **SMALL)
    assert not Path("runs/none").exists()


def test_settings_take_what_python_has() -> None:
    from shoal.runs.keywords import make_spec

    given = {
        "hidden": [32, 32],
        "lr": 1,
        "total_timesteps": np.int64(500),
        "env_kwargs": {"gravity": 5},
        "n_envs": 16,
        "batch_steps": 1e3,
    }
    spec = make_spec("ppo", "Pendulum-v1", given | {"runs": Path("there")}, preset=False)
    assert spec.config == ppo.Config(hidden=(32, 32), lr=1.0, width=4, batch_steps=1000)
    assert (spec.settings.steps, spec.settings.env_kwargs, spec.settings.runs) == (500, '{"gravity": 5}', "there")
    assert spec.problems() == []
    assert make_spec("ppo", "LunarLander-v3", {"seed": 3}).config != ppo.Config(), "presets apply"


@pytest.mark.processes
def test_trackers_are_closed_after_an_error_and_the_run_is_kept() -> None:
    tracker = Recorder(fail_at=2)
    with pytest.raises(ZeroDivisionError) as caught:
        shoal.train("ppo", "CartPole-v1", iterations=3, trackers=[tracker], name="x", **SMALL)
    assert tracker.closed == 1
    assert "saved iteration 2" in caught.value.__notes__[0]
    assert shoal.open_run("x").resume().metrics[-1]["iteration"] == 3


@pytest.mark.processes
def test_runs_in_threads_at_the_same_time() -> None:
    """Two networks that need different numbers of learner threads, and two runs of one kind."""
    kinds = [{"hidden": (8,)}, {"hidden": (8,)}, {"hidden": (512,)}]

    def digest(settings: dict[str, Any]) -> str:
        return shoal.train("ppo", "CartPole-v1", iterations=2, **SMALL | settings).digest

    alone = [digest(settings) for settings in kinds]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(digest, kinds)) == alone
    assert alone[0] == alone[1] != alone[2]


@pytest.mark.processes
def test_leaving_the_loop_ends_everything() -> None:
    before = threading.active_count()
    for step in shoal.iterate("ppo", "CartPole-v1", **SMALL | {"engine": "processes", "workers": 2}):
        assert step.policy.act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
        break
    assert threading.active_count() == before
    with shoal.engine("processes", workers=2) as engine:
        settings = SMALL | {"engine": engine}
        digests = {next(shoal.iterate("ppo", "CartPole-v1", **settings)).metrics["digest"] for _ in range(2)}
        assert len(digests) == 1, "an engine can be used again"


# The learner's own process -----------------------------------------------------------------------------------------


@pytest.fixture
def spec() -> Any:
    from shoal.runs.keywords import make_spec

    settings = {key: value for key, value in SMALL.items() if key != "preset"}
    return make_spec("ppo", "CartPole-v1", settings, preset=False).completed()


@pytest.mark.processes
def test_states_come_from_the_step_that_they_belong_to(spec: Any) -> None:
    from shoal.base.trees import digest

    with shoal.engine("serial") as engine:
        with LearnerProcess(spec, spec.config, engine, None) as learner:
            steps = learner.steps()
            first = next(steps)
            second = next(steps)
            states = [step.state() for step in (first, second)]
            expected = digest(next(steps).learned)
        assert [state["iteration"] for state in states] == [1, 2]
        with LearnerProcess(spec, spec.config, engine, states[1]) as learner:
            assert digest(next(learner.steps()).learned) == expected


@pytest.mark.processes
def test_errors_of_the_learner_are_raised_here(spec: Any) -> None:
    from dataclasses import replace

    broken = replace(spec, settings=replace(spec.settings, env=NOT_FINITE, env_kwargs='{"what": "reward"}'))
    with shoal.engine("serial") as engine, LearnerProcess(broken, spec.config, engine, None) as learner:
        with pytest.raises(EnvironmentFault, match="nan"):
            list(learner.steps())


@pytest.mark.processes
def test_a_killed_learner_is_reported_and_the_run_resumes(spec: Any) -> None:
    with shoal.engine("serial") as engine, LearnerProcess(spec, spec.config, engine, None) as learner:
        steps = learner.steps()
        next(steps)
        os.kill(learner._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            next(steps)


@pytest.mark.processes
def test_an_error_that_is_not_shoals_keeps_its_traceback(tmp_path: Path) -> None:
    from dataclasses import replace

    (tmp_path / "raising.py").write_text(
        "from dataclasses import dataclass\nfrom shoal.algos.base import AlgorithmConfig\n"
        "@dataclass(frozen=True)\nclass Config(AlgorithmConfig):\n    lanes: int = 1\n"
        "def train(*args):\n    yield 1 / 0\n"
    )
    from shoal.runs.keywords import make_spec

    made = make_spec(str(tmp_path / "raising.py"), "CartPole-v1", {}, preset=False).completed()
    with shoal.engine("serial") as engine:
        with LearnerProcess(made, replace(made.config), engine, None) as learner:
            with pytest.raises(TaskFailed, match="ZeroDivisionError") as caught:
                next(learner.steps())
    assert "raising.py" in caught.value.remote_traceback


def test_changes_of_a_resume() -> None:
    assert runs.resume_changes(steps=5) == {"steps": 5, "iterations": None}
    assert runs.resume_changes(engine="ray") == {"engine": "ray", "engine_options": "{}", "workers": None}
