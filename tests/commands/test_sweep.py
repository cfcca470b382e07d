"""`shoal sweep`: what it accepts, how it decides, and that nothing but its settings matters to its results."""

import json
import math
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import shoal
from shoal.commands.campaign import findings, heads
from shoal.commands.campaign.runs import PlannedRun
from shoal.commands.sweep.ask import source_of
from shoal.commands.sweep.console import printer_of
from shoal.commands.sweep.plan import plan_sweep
from shoal.commands.sweep.pruning import MedianRule
from shoal.commands.sweep.results import SweepResult, records_file
from shoal.commands.sweep.session import SweepSession
from shoal.commands.sweep.space import Range, assignments
from shoal.commands.sweep.trials import Sweep, SweepOptions
from shoal.errors import MissingExtra, Stopped, UsageError
from shoal.learning import xla
from shoal.runs import hints, run
from shoal.runs.folder import RunDir
from shoal.runs.keywords import make_spec
from shoal.runs.loop import RunResult
from tests.support.cli import shoal as command
from tests.support.cli import start

xla.start(1)

WALK = "tests.support.toys:Walk-v0"
SMALL = ["--lanes=2", "--width=2", "--hidden=8", "--batch-steps=128", "--epochs=2", "--minibatch=32"]
SMALL_SETTINGS = {"lanes": 2, "width": 2, "hidden": (8,), "batch_steps": 128, "minibatch": 32}


def planned(
    tmp_path: Path,
    grid: dict[str, Any] | None = None,
    search: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Sweep:
    given = {"steps": 1000} | (settings or {})
    base = make_spec("ppo", "CartPole-v1", {"runs": str(tmp_path), "engine": "serial"} | given, preset=False)
    return plan_sweep(base, SweepOptions(**options), grid or {}, search or {}, set(given))


# What is accepted --------------------------------------------------------------------------------------------------


def test_values_have_the_types_of_their_settings(tmp_path: Path) -> None:
    texts = ("lr=1e-3,3", "hidden=[64,32],8,[]", "max_kl=none,0.02", "normalise=false", 'env-kwargs={},{"a":[1,2]}')
    problems: list[str] = []
    space = planned(tmp_path, assignments(texts, "--grid", problems)).space
    assert not problems
    assert space == {
        "lr": (0.001, 3.0), "hidden": ((64, 32), (8,), ()), "max_kl": (None, 0.02), "normalise": (False,),
        "env_kwargs": ("{}", '{"a":[1,2]}'),
    }  # fmt: skip
    assert [type(value) for value in space["lr"]] == [float, float]  # type: ignore[union-attr]
    from_python = {"learning_rate": np.array([0.5, 1]), "hidden": [[4, 4]], "env_kwargs": [{"a": 1}]}
    assert planned(tmp_path, from_python).space == {"lr": (0.5, 1.0), "hidden": ((4, 4),), "env_kwargs": ('{"a": 1}',)}
    ranges = {"lr": "log:1e-5:1e-2", "clip": "float:0:1", "epochs": "int:3:20:4", "minibatch": "log:8:64"}
    assert planned(tmp_path, search=ranges).space == {
        "lr": Range(1e-5, 1e-2, log=True), "clip": Range(0, 1), "epochs": Range(3, 19, step=4),
        "minibatch": Range(8, 64, log=True, step=1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"grid": {"lr": "1,fast"}}, "lr cannot be 'fast'"),
        ({"grid": {"lr": "0.1,1e-1"}}, "lr has the value 0.1 twice"),
        ({"grid": {"lr": "1", "learning_rate": "2"}}, "the same setting"),
        ({"grid": {"lr": "log:1:2"}}, "a range, which a grid cannot have"),
        ({"grid": {"lr": 3}}, "must be a list"),
        ({"grid": {"lr": []}}, "has no values"),
        ({"grid": {"hiden": "3"}}, "Did you mean hidden?"),
        ({"grid": {"workers": "1,2"}}, "does not change results"),
        ({"grid": {"seed": "1,2"}}, "--seeds N"),
        ({"grid": {"env": "a,b"}}, "cannot be ranked"),
        ({"grid": {"n_envs": "8,16"}}, "sweep lanes or width"),
        ({"grid": {"steps": "1,2"}}, "steps is swept and also has a single value"),
        ({"grid": {"width": "1,2"}, "settings": {"n_envs": 4}}, "n_envs sets the width too"),
        ({"grid": {"lr": "1,-2"}}, "1: lr=-2: lr must be above 0"),
        ({"grid": {"lr": "1"}, "search": {"clip": "1,2"}}, "either a grid or a search"),
        ({}, "nothing to sweep"),
        ({"grid": {"lr": "1"}, "trials": 3}, "trials is for a search"),
        ({"grid": {"lr": "1"}, "prune_every": 1000}, "must be less than steps"),
        ({"grid": {"lr": "1"}, "seeds": 0, "at_once": 99}, "seeds must be at least 1"),
        ({"search": {"lr": "log:0:1"}}, "must start above 0"),
        ({"search": {"lr": "float:2:1"}}, "below the high end"),
        ({"search": {"lr": "float:0:inf"}}, "a range is written float:LOW:HIGH"),
        ({"search": {"lr": "int:1:2"}}, "a real number"),
        ({"search": {"epochs": "float:1:2"}}, "an integer"),
        ({"search": {"epochs": "int:1:2:0"}}, "int:LOW:HIGH:STEP"),
        ({"search": {"activation": "log:1:2"}}, "not a number"),
        ({"search": {"minibatch": "int:3000:4000"}}, "must not be larger than batch_steps"),
    ],
)
def test_mistakes_are_refused(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        planned(tmp_path, **asked)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_mistakes_are_refused_all_at_once(tmp_path: Path) -> None:
    wrong = ["lr=1,fast", "lr=3", "hiden=3", "gamma=0.9,0.8", "clip"]
    code, _, err = command(
        "sweep", "ppo", "CartPol-v1", "--no-preset", "--gamma=0.9", "--seeds=0", "--grid", *wrong, cwd=tmp_path
    )
    assert code == 2
    for part in ("has lr twice", "'fast'", "Did you mean hidden?", "gamma is swept and", "'clip' has no value",
                 "seeds must be", "no environment 'CartPol-v1'"):  # fmt: skip
        assert part in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_names_find_the_same_runs_in_a_larger_grid(tmp_path: Path) -> None:
    small, large = (
        planned(tmp_path, {"lr": lrs, "hidden": "[8,8],4"}, seeds=seeds) for lrs, seeds in (("1e-4", 1), ("3,1e-4", 2))
    )
    names = [
        {run.folder.name for n, point in enumerate(points) for run in sweep.trial(n, point).runs}
        for sweep, points in (
            (small, [{"lr": 1e-4, "hidden": (8, 8)}]),
            (large, [{"lr": lr, "hidden": hidden} for lr in (3.0, 1e-4) for hidden in ((8, 8), (4,))]),
        )
    ]
    assert names[0] == {"lr-0.0001-hidden-8x8-seed0"}
    assert names[0] < names[1]
    assert len(names[1]) == 8
    long = [small.trial(0, {"wrap": (f"TimeAwareObservation-and-much-more-{n}",)}).runs[0].folder.name for n in (1, 2)]
    assert long[0] != long[1]
    assert all(len(name) <= 64 for name in long)


def test_the_command_for_one_trial_has_all_its_settings(tmp_path: Path) -> None:
    wrappers = ["FrameStackObservation:4", "FlattenObservation"]
    found = planned(tmp_path, {"normalise": "false"}, settings={"gamma": 0.9, "wrap": wrappers, "hidden": (8, 4)})
    words = hints.train_command(found.trial(0, {"normalise": False}).runs[0].spec)
    assert words.endswith(
        "train ppo CartPole-v1 --no-preset --steps=1000 --wrap=FrameStackObservation:4 --wrap=FlattenObservation "
        "--gamma=0.9 --hidden 8 4 --no-normalise"
    )


def test_a_search_names_the_missing_extra_and_a_grid_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert planned(tmp_path, {"lr": "1,2"}).count == 2
    with pytest.raises(MissingExtra, match=re.escape("pip install 'shoal[sweep]'")):
        planned(tmp_path, search=SEARCH)


# How it decides ----------------------------------------------------------------------------------------------------


def test_the_median_rule() -> None:
    rule = MedianRule()
    assert rule.judge(10, [1.0, None, 3.0]) == [False] * 3, "too few to judge"
    assert rule.judge(10, [2.0, 2.5, None]) == [True, False, False], "below 2.25, the median of all four"
    assert rule.judge(20, [0.0]) == [False], "each rung has its own median"
    assert rule.judge(10, [2.0, 2.0, 2.0]) == [False] * 3, "equal to the median is enough"


SEARCH = {"lr": "log:1e-5:1e-1", "epochs": "int:1:20", "minibatch": "int:64:4096", "activation": "tanh,relu"}


def trained(tmp_path: Path, seed: int = 0, **changes: Any) -> Sweep:
    options = {"trials": 20, "seeds": 2, "prune_every": 300} | changes
    return planned(tmp_path / str(seed), search=SEARCH, **options)


class FakeTraining:
    """Takes the place of `heads.train_all`: writes metrics that follow from the settings, in a shuffled order."""

    def __init__(self, shuffle: int, stop_after: int | None = None, fails: Callable[[PlannedRun], bool] | None = None):
        self.random, self.left = random.Random(shuffle), stop_after
        self.fails = fails or (lambda run: run.spec.config.lr > 0.05)  # type: ignore[attr-defined]
        self.scored = 0

    def __call__(
        self, runs: Sequence[PlannedRun], engine: object, at_once: int, listener: object, pause: int | None = None
    ) -> dict[PlannedRun, str]:
        failures = {}
        for planned_run in self.random.sample(runs, len(runs)):
            if planned_run.stands(pause):
                continue
            if self.left == 0:
                raise Stopped(signal.SIGTERM)
            self.left = None if self.left is None else self.left - 1
            if self.fails(planned_run):
                failures[planned_run] = "diverged"
            else:
                self.train(planned_run, pause)
        return failures

    def train(self, planned_run: PlannedRun, pause: int | None) -> None:
        folder, spec = planned_run.folder, planned_run.spec
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        record = spec.to_record() | {"fingerprint": {}}
        folder.write_record(record)  # type: ignore[arg-type]
        end = min(spec.settings.steps, pause or math.inf)
        count = math.ceil(end / 90)
        quality = -abs(math.log10(spec.config.lr) + 3) + spec.settings.seed / 10  # type: ignore[attr-defined]
        rows = [
            {"iteration": n, "time/total_timesteps": 90 * n, "time/time_elapsed": self.random.random(),
             "rollout/ep_rew_mean": n * (5 + quality), "digest": f"{n} {quality}"}
            for n in range(1, count + 1)
        ]  # fmt: skip
        folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder.checkpoints / f"{count:06}").mkdir(exist_ok=True)

    def assess(self, planned_run: PlannedRun, engine: object, episodes: int) -> findings.Finding:
        self.scored += 1
        rows = planned_run.folder.metrics()
        return findings.Finding(planned_run, rows[-1]["rollout/ep_rew_mean"], findings.learning_curve(rows, 0))


def sit(sweep: Sweep, training: FakeTraining, monkeypatch: pytest.MonkeyPatch) -> SweepResult:
    monkeypatch.setattr(heads, "train_all", training)
    monkeypatch.setattr(findings, "assess_run", training.assess)
    with shoal.engine("serial") as engine, printer_of(Console(quiet=True), sweep) as printer:
        session = SweepSession(sweep, engine, printer)
        result = session.run()
        session.report(result).write()
    return result


def test_arrival_order_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, files = [], []
    for shuffle in range(2):
        sweep = trained(tmp_path, shuffle)
        results.append(sit(sweep, FakeTraining(shuffle), monkeypatch))
        files.append([records_file(sweep).read_bytes(), (sweep.folder / "table.md").read_bytes()])
    assert files[0] == files[1]
    assert results[0].trials == results[1].trials
    found = results[0].trials
    assert {trial.state for trial in found} == {"finished", "pruned", "failed"}
    assert len(found) == 20
    assert found[0] == results[0].best
    finished = [trial.score for trial in found if trial.state == "finished"]
    assert finished == sorted(finished, key=lambda score: -(score or 0))
    assert any("minibatch" in trial.reason for trial in found), "invalid suggestions are failed trials"
    pruned = next(trial for trial in found if trial.state == "pruned")
    assert set(pruned.returns) <= {300, 600, 900}
    assert (pruned.score, pruned.runs) == (None, ())
    picture = (results[0].path / "curves.svg").read_text()
    assert picture.count("<polyline") == 2 * min(8, len(finished))


def test_an_interrupted_sweep_takes_the_same_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(tmp_path)
    sit(whole, FakeTraining(0), monkeypatch)
    sweep, sittings = trained(tmp_path, 1), 0
    while True:
        sittings += 1
        try:
            sit(trained(tmp_path, 1), FakeTraining(sittings, stop_after=9), monkeypatch)
        except Stopped:
            assert sittings < 30
        else:
            break
    assert sittings > 3
    assert records_file(sweep).read_bytes() == records_file(whole).read_bytes()
    again = FakeTraining(0)
    sit(trained(tmp_path, 1), again, monkeypatch)
    assert again.scored == 0, "scores of the same policies are kept"
    assert records_file(sweep).read_bytes() == records_file(whole).read_bytes()


def test_more_trials_go_on_from_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sit(trained(tmp_path, trials=11), FakeTraining(0), monkeypatch)
    sit(trained(tmp_path), FakeTraining(1), monkeypatch)
    whole = trained(tmp_path, 1)
    sit(whole, FakeTraining(2), monkeypatch)
    assert records_file(trained(tmp_path)).read_bytes() == records_file(whole).read_bytes()
    with pytest.raises(UsageError, match="holds 20 trials already"):
        trained(tmp_path, trials=11)


def test_failures_stay_once_suggestions_depend_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(trial for trial in source_of(trained(tmp_path)).ask() if not trial.problems)
    name = first.runs[0].folder.name

    def unlucky(stop_after: int | None = None) -> FakeTraining:
        return FakeTraining(0, stop_after, fails=lambda run: run.folder.name == name)

    def lucky(stop_after: int | None = None) -> FakeTraining:
        return FakeTraining(0, stop_after, fails=lambda run: False)

    whole = trained(tmp_path, 1)
    sit(whole, unlucky(), monkeypatch)
    expected = records_file(whole).read_bytes()
    assert f'"{name}: diverged"'.encode() in expected

    sweep = trained(tmp_path)
    with pytest.raises(Stopped):
        sit(sweep, unlucky(stop_after=32), monkeypatch)
    second = [path for path in sweep.folder.glob("trial-0*") if int(path.name[6:9]) >= 8]
    assert second, "the second batch has begun"
    lost = next(path for path in sorted(sweep.folder.glob("trial-00*/metrics.jsonl")) if name[:9] not in str(path))
    lost.unlink()  # the next sitting is stopped while it goes through the first batch again
    with pytest.raises(Stopped):
        sit(trained(tmp_path), lucky(stop_after=0), monkeypatch)
    sit(trained(tmp_path), lucky(), monkeypatch)
    assert records_file(sweep).read_bytes() == expected


def test_failed_runs_of_a_grid_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grid() -> Sweep:
        return planned(tmp_path, {"lr": "1e-3,1e-2"})

    failed = sit(grid(), FakeTraining(0, fails=lambda run: run.spec.config.lr == 1e-2), monkeypatch)  # type: ignore[attr-defined]
    assert [trial.state for trial in failed.trials] == ["finished", "failed"]
    assert [trial.state for trial in sit(grid(), FakeTraining(0), monkeypatch).trials] == ["finished", "finished"]


def test_another_sweep_in_the_same_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = trained(tmp_path)
    sit(sweep, FakeTraining(0), monkeypatch)
    with pytest.raises(UsageError, match=r"trial_batch 8 then, 4 now.*another --name"):
        trained(tmp_path, trial_batch=4)
    with pytest.raises(UsageError, match=r"made with other settings \(gamma 0.99 then, 0.9 now\)"):
        planned(tmp_path / "0", search=SEARCH, settings={"gamma": 0.9}, trials=20, seeds=2, prune_every=300)
    with pytest.raises(UsageError, match="holds another sweep"):
        planned(tmp_path / "0", grid={"lr": "1,2"})
    late = next(path for path in sorted(sweep.folder.glob("trial-01*/config.json")))
    record = json.loads(late.read_text())
    record["config"]["lr"] = 0.5
    late.write_text(json.dumps(record))
    with pytest.raises(UsageError, match="Optuna's version must have changed"):
        sit(trained(tmp_path), FakeTraining(0), monkeypatch)


# Real runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_paused_runs_have_the_bits_of_whole_ones(tmp_path: Path) -> None:
    asked = ["sweep", "ppo", WALK, *SMALL, "--lr-schedule=linear", "--steps=256", "--grid", "lr=1e-2"]
    asked += ["--prune-every=100", "--final-episodes=8", "--workers=1"]
    code, out, err = command(*asked, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "paused at 128 steps" in out
    assert re.search(r"^Train: +.*shoal train ppo .*--no-preset", out, re.MULTILINE)
    folder = tmp_path / "runs" / "sweep-ppo-Walk-v0"
    record = json.loads((folder / "trials.json").read_text())
    best = max(record["trials"], key=lambda trial: trial["score"])
    settings = SMALL_SETTINGS | {"epochs": 2, "lr_schedule": "linear", "steps": 256} | best["settings"]
    spec = make_spec(
        "ppo", WALK, settings | {"engine": "serial", "runs": str(tmp_path / "alone"), "tensorboard": False}
    )
    alone: RunResult = run.train(spec, console=Console(quiet=True))
    shared = RunDir(folder / best["runs"][0]["name"])
    assert [row["digest"] for row in shared.metrics()] == [row["digest"] for row in alone.run.metrics()]
    assert best["runs"][0]["digest"] == alone.metrics["digest"]
    assert f"| {best['score']:.1f} " in (folder / "table.md").read_text()


LONG = ["sweep", "ppo", WALK, *SMALL[:-2], "--steps=1024"]
LONG += ["--search", "lr=log:1e-5:1", "epochs=int:1:3", "minibatch=int:16:140"]
LONG += ["--trials=9", "--trial-batch=6", "--prune-every=500", "--final-episodes=8"]


def outcome(cwd: Path) -> tuple[bytes, bytes]:
    folder = cwd / "runs" / "sweep-ppo-Walk-v0"
    return (folder / "trials.json").read_bytes(), (folder / "table.md").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_and_kills_change_nothing(tmp_path: Path) -> None:
    outcomes = []
    for name, words in {"one": ["--workers=1", "--at-once=1"], "three": ["--workers=3", "--at-once=4"]}.items():
        (tmp_path / name).mkdir()
        code, out, err = command(*LONG, *words, cwd=tmp_path / name, timeout=280)
        assert (code, err) == (0, ""), out
        outcomes.append(outcome(tmp_path / name))
    assert outcomes[0] == outcomes[1]
    assert b'"pruned"' in outcomes[0][0]

    killed = tmp_path / "killed"
    killed.mkdir()
    for number, least in ((signal.SIGKILL, 3), (signal.SIGINT, 20), (signal.SIGKILL, 40)):
        process = start(*LONG, "--workers=2", cwd=killed)
        deadline = time.monotonic() + 120
        while len(b"".join(path.read_bytes() for path in killed.glob("runs/*/*/metrics.jsonl")).splitlines()) < least:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert number == signal.SIGKILL or "run the same command again" in out
    code, _, err = command(*LONG, "--workers=2", cwd=killed, timeout=280)
    assert (code, err) == (0, "")
    assert outcome(killed) == outcomes[0]

    before = {path: path.stat().st_mtime_ns for path in killed.glob("runs/*/*/metrics.jsonl")}
    assert len(before) > 4
    code, again, _ = command(*LONG, "--workers=1", cwd=killed)
    assert code == 0
    assert "are done already" in again
    assert before == {path: path.stat().st_mtime_ns for path in killed.glob("runs/*/*/metrics.jsonl")}
    assert outcome(killed) == outcomes[0]


@pytest.mark.slow
def test_from_python(tmp_path: Path) -> None:
    found = shoal.sweep(
        "ppo", WALK, grid={"lr": [1e-3, 1e4], "epochs": [2]}, seeds=2, steps=256, final_episodes=8, workers=2,
        runs=tmp_path, **SMALL_SETTINGS,
    )  # fmt: skip
    assert found.best is not None
    assert found.path == tmp_path / "sweep-ppo-Walk-v0"
    assert {path.name for path in found.path.iterdir()} >= {"trials.json", "table.md", "curves.svg"}
    assert [sorted(trial.settings) for trial in found.trials] == [["epochs", "lr"]] * 2
    with pytest.raises(UsageError, match="lr is swept and also has a single value"):
        shoal.sweep("ppo", WALK, grid={"lr": [1e-3]}, learning_rate=0.1)
