"""`shoal compare` as a user meets it, and what it makes of the numbers."""

import dataclasses
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from shoal.commands.campaign import findings, heads
from shoal.commands.compare.plan import Comparison, plan_runs, tuning_warning
from shoal.errors import UsageError
from shoal.learning import xla
from shoal.runs import run
from shoal.runs.folder import RunDir
from tests.support.cli import shoal, start

xla.start(1)

WALK = "tests.support.toys:Walk-v0"
SMALL = ["lanes=2", "width=2", "hidden=8", "batch_steps=128"]
OF_EACH = {
    "ppo": ["epochs=2", "minibatch=32"],
    "trpo": ["value_epochs=1"],
    "dqn": ["buffer_size=2000", "learning_starts=64"],
}


def words(*algos: str, env: str = WALK, steps: int = 512, seeds: int = 2) -> list[str]:
    own = [f"{algo}.{setting}" for algo in algos for setting in [*SMALL, *OF_EACH[algo]]]
    return ["compare", env, "--algos", *algos, "--set", *own, f"--steps={steps}", f"--seeds={seeds}", "--workers=2"]


def folder(cwd: Path, env: str = "tests.support.toys-Walk-v0") -> Path:
    return cwd / "runs" / f"compare-{env}"


@pytest.mark.processes
def test_each_run_is_what_it_is_alone_and_is_not_run_again(tmp_path: Path) -> None:
    asked = words("ppo", "dqn")
    code, out, err = shoal(*asked, "--at-once=3", cwd=tmp_path)
    assert (code, err) == (0, "")
    settings = tuple(asked[asked.index("--set") + 1 : -3])
    for job in plan_runs(Comparison(WALK, ("ppo", "dqn"), 2, 512, settings, runs=str(tmp_path / "alone")))[1:3]:
        lone = dataclasses.replace(job.spec.settings, engine="serial", tensorboard=False)
        alone = run.train(dataclasses.replace(job.spec, settings=lone), console=Console(quiet=True))
        shared = RunDir(folder(tmp_path) / job.folder.name)
        assert [line["digest"] for line in shared.metrics()] == [line["digest"] for line in alone.run.metrics()]
        assert f"digest {alone.metrics['digest']}" in out
    table = (folder(tmp_path) / "table.md").read_text()
    assert set(re.findall(r"^\| (\w+) +\| 2 ", table, re.MULTILINE)) == {"ppo", "dqn"}
    picture = (folder(tmp_path) / "curves.svg").read_text()
    assert (picture.count("<polyline"), picture.count("<polygon")) == (4, 4)
    assert "environment steps" in picture
    assert "seconds" in picture

    before = {path: path.stat().st_mtime_ns for path in folder(tmp_path).glob("*/metrics.jsonl")}
    assert len(before) == 4
    code, again, _ = shoal(*asked, cwd=tmp_path)
    assert code == 0
    assert "4 of 4 are done already" in again
    assert before == {path: path.stat().st_mtime_ns for path in folder(tmp_path).glob("*/metrics.jsonl")}
    rows = [re.findall(r"^\| (?:ppo|dqn) .*", text, re.MULTILINE) for text in (out, again)]
    assert rows[0] == rows[1]


def wait_for_iterations(process: "subprocess.Popen[str]", cwd: Path, least: dict[str, int]) -> None:
    deadline = time.monotonic() + 60
    while any(len(RunDir(folder(cwd) / name).metrics()) < count for name, count in least.items()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def saved_whole(cwd: Path, name: str) -> int:
    found = RunDir(folder(cwd) / name)
    iterations = [line["iteration"] for line in found.metrics()]
    assert iterations == list(range(1, len(iterations) + 1))
    assert found.saved()[0] == iterations[-1], "nothing that was learned is lost"
    return iterations[-1]


@pytest.mark.processes
def test_a_signal_saves_all_and_the_same_command_goes_on(tmp_path: Path) -> None:
    asked = words("ppo", "trpo", steps=10**9, seeds=1)
    reached = {"ppo-seed0": 0, "trpo-seed0": 0}
    for number in (signal.SIGINT, signal.SIGKILL):  # heads save also when their owner can say nothing
        process = start(*asked, cwd=tmp_path)
        wait_for_iterations(process, tmp_path, {name: count + 2 for name, count in reached.items()})
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 4, "two heads and two workers"
        groups = {os.getpgid(child.pid) for child in children}
        assert os.getpgid(process.pid) not in groups, "a terminal's Ctrl-C reaches their owner alone"
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert number == signal.SIGKILL or "run the same command again" in out
        assert "Traceback" not in out + err
        assert psutil.wait_procs(children, timeout=15)[1] == []
        reached = {name: saved_whole(tmp_path, name) for name in reached}


@pytest.mark.processes
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    code, out, err = shoal(*words("dqn", "trpo", env="tests.support.toys:Aim-v0", seeds=1), cwd=tmp_path)
    assert code == 1
    assert "Traceback" not in out + err
    assert re.search(r"dqn seed 0 failed after .* s: dqn needs a Discrete action space", out)
    assert "Failed:  dqn seed 0" in out
    assert re.search(r"^\| trpo ", out, re.MULTILINE)


@pytest.mark.processes
def test_mistakes_are_refused_all_at_once(tmp_path: Path) -> None:
    mistakes = ["compare", "CartPol-v1", "--algos", "pppo", "ppo", "ppo", "dqn:x", "--seeds=0", "--at-once=99"]
    code, _, err = shoal(*mistakes, "--set", "ppo.lr=fast", "ppo.hiden=3", "sac.x=1", "nonsense", cwd=tmp_path)
    assert code == 2
    for words_of_it in (
        "no environment 'CartPol-v1'", "Did you mean ppo?", "ppo is given twice", "dqn has no optimizer",
        "seeds must be at least 1", "at_once must be at most", "lr cannot be 'fast'", "Did you mean hidden?",
        "'sac.x=1' is for sac, which is not compared", "'nonsense' is not a setting",
    ):  # fmt: skip
        assert words_of_it in err
    assert not (tmp_path / "runs").exists()


def comparison(tmp_path: Path, **values: Any) -> Comparison:
    return Comparison(**{"env": "CartPole-v1", "algos": ("ppo", "dqn"), "runs": str(tmp_path)} | values)


def test_presets_overrides_and_steps(tmp_path: Path) -> None:
    jobs = plan_runs(comparison(tmp_path, seeds=2, set=("dqn.hidden=32,16", "ppo.max_kl=none", "ppo.normalise=false")))
    assert [str(job) for job in jobs] == ["ppo seed 0", "dqn seed 0", "ppo seed 1", "dqn seed 1"]
    ppo, dqn = jobs[:2]
    assert {job.spec.settings.steps for job in jobs} == {100_000}, "the most that a preset has"
    assert (ppo.spec.config.gamma, ppo.spec.config.max_kl, ppo.spec.config.normalise) == (0.98, None, False)
    assert (dqn.spec.config.hidden, dqn.spec.config.n_step) == ((32, 16), 5)
    assert plan_runs(comparison(tmp_path, preset=False))[0].spec.config.gamma == 0.99
    pong = plan_runs(comparison(tmp_path, env="Pong-ram", algos=("dqn", "trpo")))
    assert {(job.spec.settings.env, job.spec.settings.env_kwargs) for job in pong} == {
        ("ALE/Pong-v5", '{"obs_type": "ram"}')
    }
    assert pong[1].spec.config.gamma == 0.995


@pytest.mark.parametrize(
    "given", [("lr=1", "lr=2"), ("value-coef=1", "value_coef=1"), ("from=a", "start=b")], ids=lambda given: given[1]
)
def test_a_setting_that_is_given_twice(given: tuple[str, str], tmp_path: Path) -> None:
    own = tuple(f"es.{text}" for text in given)
    with pytest.raises(UsageError, match=rf"es\.\w+ is set more than once, again by '{own[1]}'"):
        plan_runs(comparison(tmp_path, algos=("es",), set=own))
    labels = ("nevergrad.hidden=8", "nevergrad:CMA.hidden=9")
    (job,) = plan_runs(comparison(tmp_path, algos=("nevergrad:CMA",), seeds=1, set=labels))
    assert job.spec.config.hidden == (9,), "an optimizer's own setting comes before its algorithm's"


def test_what_optimizers_print_is_no_progress() -> None:
    assert heads.parse_progress('{"steps": 7, "return": null}') == (7, None)
    assert [heads.parse_progress(line) for line in ("{'a': 1}", "{}", "[1]", "7", "", "{steps")] == [None] * 6


def test_a_side_without_a_preset_is_named(tmp_path: Path) -> None:
    sides = ("es", "nevergrad:DE")
    assert "no preset for this task for nevergrad:DE, only" in tuning_warning(
        plan_runs(comparison(tmp_path, env="ant", algos=sides))
    )
    assert not tuning_warning(plan_runs(comparison(tmp_path, env="lander", algos=sides))), "both have one"
    assert not tuning_warning(plan_runs(comparison(tmp_path, algos=sides, preset=False))), "neither has one"


def test_runs_with_other_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    job = plan_runs(comparison(tmp_path, seeds=1))[0]
    run.create(job.spec)
    assert plan_runs(comparison(tmp_path, seeds=3)), "more seeds go with those that are there"
    with pytest.raises(UsageError, match=r"ppo-seed0 in .*lr 0.001 then, 0.01 now.*another --name") as caught:
        plan_runs(comparison(tmp_path, set=("ppo.lr=0.01",)))
    assert len(caught.value.problems) == 1


def finding(label: str, seed: int, score: float, points: list[tuple[float, float, float]]) -> findings.Finding:
    job = plan_runs(Comparison("CartPole-v1", (label,), seeds=seed + 1))[seed]
    return findings.Finding(job, score, np.array(points))


def test_table_and_lines() -> None:
    found = [
        finding("ppo", 0, 10.0, [(0, 0, 0.0), (100, 1, 10.0)]),
        finding("ppo", 1, 30.0, [(0, 0, 0.0), (100, 3, 30.0)]),
        finding("dqn", 0, 50.0, [(0, 0, 50.0), (100, 1, 50.0)]),
    ]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in findings.tabulate(found, 20).splitlines()]
    assert rows[2] == ["dqn", "1", "50.0", "50.0 to 50.0", "50.0", "50.0", "0", "100", "1.0"], "the best is first"
    assert rows[3] == ["ppo", "2", "20.0", "10.0 to 30.0", "20.0", "10.0", "100 (1 of 2)", "100", "2.0"]
    assert findings.tabulate(found, 99).count("never") == 2
    over_time = findings._curve(found[:2], 1)
    assert over_time.points[-1] == (3.0, 20.0), "one that has ended keeps its last return"
    assert over_time.band[-1] == (3.0, 10.0, 30.0)
    halfway = findings._curve(found[:2], 0)
    np.testing.assert_allclose(np.array(halfway.points)[:, 1], np.linspace(0, 20, findings.POINTS))


def test_returns_along_the_way_are_means_of_a_hundred_episodes() -> None:
    lines = [
        {"time/time_elapsed": n, "time/total_timesteps": n, "rollout/ep_rew_mean": -n, "eval/mean_reward": float(n)}
        for n in range(10)
    ]
    own = [*[n / 2 for n in range(5)], 3, 4, 5, 6, 7]  # means of the last five, of 20 episodes each
    np.testing.assert_allclose(findings.learning_curve(lines, 20)[:, 2], own)
    np.testing.assert_allclose(findings.learning_curve(lines, 0)[:, 2], [-n for n in range(10)])


@pytest.mark.slow
def test_searches_are_compared_and_start_from_a_run(tmp_path: Path) -> None:
    small = ["population=4", "hidden=4", "score_episodes=2"]
    assert shoal("train", "es", WALK, *[f"--{s.replace('_', '-')}" for s in small], "--steps=100", "--name=first",
                 cwd=tmp_path)[0] == 0  # fmt: skip
    of_es, of_nevergrad = ([f"{algo}.{setting}" for setting in [*small, "from=first"]] for algo in ("es", "nevergrad"))
    goal = ["--steps=200", "--seeds=1"]
    both = ["compare", WALK, "--algos", "es", "nevergrad:DE", "--set", *of_es, *of_nevergrad]
    code, out, err = shoal(*both, *goal, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert re.search(r"\| nevergrad:DE +\| 1 ", out)
    assert (folder(tmp_path) / "es-seed0/start.safetensors").is_file()
    # One that cannot begin leaves nothing behind that would refuse the mended command.
    one = ["compare", WALK, "--algos", "nevergrad:HammersleySearch", *goal, "--name=other", "--set", *of_nevergrad]
    code, out, _ = shoal(*one, cwd=tmp_path)
    assert (code, "--budget N" in out) == (1, True)
    code, _, err = shoal(*one, "nevergrad.budget=100", cwd=tmp_path)
    assert (code, err) == (0, "")


def test_a_run_in_which_no_episode_ended_is_in_the_table() -> None:
    found = [finding("ppo", 0, 10.0, [(100, 1, math.nan)]), finding("dqn", 0, 5.0, [(100, 1, math.nan), (200, 2, 5.0)])]
    text = findings.tabulate(found, 7)
    assert re.search(r"ppo .* nan .* never .* 100 ", text)
    assert findings.plot("x", found).count("<polyline") == 2, "of the other one"
