"""Replay: any episode of a run is computed again, alone, from what the run left on disk."""

import csv
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from shoal import algos
from shoal.commands import replay
from shoal.engines.serial import SerialEngine
from shoal.envs.make import EnvSpec, make_env
from shoal.errors import UsageError
from shoal.runs import run
from shoal.runs.folder import RunDir
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec
from shoal.sampling import tasks
from shoal.sampling.scores import WINDOW
from tests.support import toys
from tests.support.lanes import WALK, head_side, policy_for

pytestmark = pytest.mark.trains

PPO = {"batch_steps": 64, "lanes": 2, "width": 4, "hidden": (8,), "epochs": 1, "minibatch": 32}
TRPO = {"batch_steps": 128, "lanes": 2, "width": 4, "hidden": (8,), "value_epochs": 1}


def trained(
    root: Path, algo: str, config: dict[str, Any], env: str = "tests.support.toys:Walk-v0", **settings: Any
) -> RunDir:
    chosen = {
        "iterations": 4,
        "checkpoint_every": 2,
        "runs": str(root),
        "name": "mine",
        "tensorboard": False,
    } | settings
    with SerialEngine() as engine:
        spec = RunSpec(algo, Settings(env, engine="serial", **chosen), algos.load(algo).Config(**config))
        run.train(spec, engine=engine, console=Console(quiet=True))
    return RunDir(root / "mine")


def resumed(folder: RunDir, iterations: int | None = None) -> None:
    goal = {} if iterations is None else {"iterations": iterations}
    with SerialEngine() as engine:
        run.resume("mine", folder.path.parent, goal, engine=engine, console=Console(quiet=True))


def again(folder: RunDir, iteration: int) -> tuple[replay.RelearnedIteration, str]:
    """The iteration learned again, and from where."""
    said: list[str] = []
    found = replay.relearn(folder, iteration, None, said.append)
    (line,) = said
    return found, line


def contents(folder: RunDir) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Four iterations, with the checkpoints of 2 and 4. Only to be read."""
    return trained(tmp_path_factory.mktemp("replay") / "runs", "ppo", PPO)


@pytest.fixture
def copy(shared_run: RunDir, tmp_path: Path) -> RunDir:
    """A copy of it to be changed."""
    return RunDir(Path(shutil.copytree(shared_run.path, tmp_path / "runs/mine")))


BOX = {"env_kwargs": json.dumps({"observation": "float64", "action": "box"})}
ODD = {"env_kwargs": json.dumps({"observation": "dict", "action": "from one"}), "max_episode_steps": 6}


@pytest.mark.parametrize(
    ("algo", "config", "settings"),
    [("ppo", PPO, {}), ("ppo", PPO, ODD), ("trpo", TRPO | {"batch": "episodes"}, BOX)],
    ids=["fragments", "fragments-limit", "episodes"],
)
def test_every_episode_of_a_run_is_equal(algo: str, config: Any, settings: Any, tmp_path: Path) -> None:
    folder = trained(tmp_path, algo, config, **settings)
    before = contents(folder)
    found: list[replay.RecordedEpisode] = []
    unseen = []
    starts = []
    for iteration in range(1, 5):
        there, said = again(folder, iteration)
        assert there.difference == ""
        starts.append(said)
        for episode in there.episodes:
            assert replay.replay_episode(episode, there.env).difference == ""
        found += there.episodes
        unseen.append(max(episode.unseen for episode in there.episodes))
    assert starts == [
        "Learning iteration 1 again, from the start",
        "Learning iterations 1 to 2 again, from the start",
        "Learning iteration 3 again, from the checkpoint of 2",
        "Learning iterations 3 to 4 again, from the checkpoint of 2",
    ]
    # The run counted its episodes itself, in its own order.
    _, state = folder.load()
    assert len(found) == state["scores"]["episodes"]
    for own, name in (([e.total for e in found], "returns"), ([e.length for e in found], "lengths")):
        np.testing.assert_array_equal(own[-WINDOW:], state["scores"][name])
    assert {True, False} == {episode.terminated for episode in found}
    if config.get("batch") == "episodes":
        assert unseen == [0, 0, 0, 0]
    else:
        assert unseen[:2] == [0, 0]
        assert unseen[2] > 0, "some began before the checkpoint of 2"
        assert len({(e.lane, e.slot, e.number) for e in found}) == len(found)
    assert contents(folder) == before, "a replay only reads"


def test_a_run_that_was_resumed_with_another_goal(tmp_path: Path) -> None:
    """Schedules end at the goal, so each iteration has to be learned again with the goal that it had."""
    folder = trained(tmp_path, "ppo", PPO | {"lr_schedule": "linear"}, iterations=2)
    resumed(folder, 4)
    resumed(folder, 4)  # changes nothing
    assert folder.record()["schedule_ends"] == {"0": 128, "2": 256}
    for checkpoint in folder.saved():
        shutil.rmtree(folder.checkpoints / f"{checkpoint:06}")
    there, said = again(folder, 4)
    assert (said, there.difference) == ("Learning iterations 1 to 4 again, from the start", "")
    assert max(episode.length for episode in there.episodes) > 8, "one spans fragments"
    assert all(episode.unseen == 0 for episode in there.episodes), "also not the part before the resume"
    assert not [e for e in there.episodes if replay.replay_episode(e, there.env).difference]

    record = folder.record()
    folder.write_record(record | {"schedule_ends": {"0": 256}})
    assert "iteration 2 has the digest" in again(folder, 2)[0].difference, "it matters"


def test_schedules_end_with_the_last_iteration(tmp_path: Path) -> None:
    """Also where a batch of 100 steps does not go into 6 slots, and 102 are taken."""
    uneven = PPO | {"batch_steps": 100, "width": 3, "lr_schedule": "linear"}
    folder = trained(tmp_path, "ppo", uneven, iterations=2)
    assert folder.record()["schedule_ends"] == {"0": 204}
    assert folder.metrics()[-1]["time/total_timesteps"] == 204


def test_a_resume_that_goes_back_moves_the_schedules_there(tmp_path: Path) -> None:
    folder = trained(tmp_path, "ppo", PPO | {"lr_schedule": "linear"}, iterations=4)
    resumed(folder, 6)
    assert folder.record()["schedule_ends"] == {"0": 256, "4": 384}
    for name in ("000006", "000004"):
        (folder.checkpoints / name / "manifest.json").write_text("{}")
    resumed(folder)
    assert folder.record()["schedule_ends"] == {"0": 256, "2": 384}
    there, said = again(folder, 4)
    assert (said, there.difference) == ("Learning iterations 3 to 4 again, from the checkpoint of 2", "")


def test_a_damaged_checkpoint_costs_time_only(copy: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    (copy.checkpoints / "000002/state.safetensors").write_bytes(b"")
    there, said = again(copy, 3)
    assert "0 bytes instead of" in caplog.text
    assert (said, there.difference) == ("Learning iterations 1 to 3 again, from the start", "")


def test_a_difference_on_the_way_is_named(copy: RunDir) -> None:
    lines = copy.metrics()
    lines[2]["digest"], lines[2]["digests"]["adam"] = "0" * 16, "1" * 16
    copy.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    there, _ = again(copy, 4)
    pattern = r"iteration 3 has the digest \w{16} now and 0{16} in the run; what differs: adam"
    assert re.fullmatch(pattern, there.difference)
    assert there.episodes == []
    assert again(copy, 2)[0].difference == ""


def test_the_learner_has_the_threads_of_the_run(copy: RunDir) -> None:
    record = copy.record()
    record["settings"]["learner_threads"] = 3
    copy.write_record(record)
    with pytest.raises(UsageError, match="this run learns with 3 thread"):
        again(copy, 1)


# The engine that records -----------------------------------------------------------------------------------------


def test_recording_engine_follows_lanes_that_move() -> None:
    _, weights = policy_for(WALK)
    found = []
    for forget in (False, True):
        tasks.held.clear()
        with replay.RecordingEngine() as engine:
            side = head_side(engine, WALK)
            for _ in range(6):
                side.fragments(engine.share(weights), 5)
                if forget:
                    tasks.held.clear()
            found.append(engine.ended)
    assert len(found[0]) == len(found[1]) > 8
    for one, other in zip(*found, strict=True):
        for name, value in vars(one).items():
            np.testing.assert_array_equal(value, getattr(other, name))
        assert one.unseen == 0


def test_recording_engine_counts_results_when_they_are_taken() -> None:
    """An algorithm may submit the next iteration's tasks before it yields this one."""
    policy, weights = policy_for(WALK)
    place = {"seed": 5, "purpose": "episode", "width": 4, "env": WALK.to_record()}
    with replay.RecordingEngine() as engine:
        first, second = (
            engine.submit(tasks.episodes, place | {"lane": lane}, policy.to_record(), weights, {"episodes": 3})
            for lane in (0, 1)
        )
        assert engine.ended == []
        second.result()
        second.result()
        assert [episode.lane for episode in engine.ended] == [1, 1, 1]
        first.result()
        assert [episode.lane for episode in engine.ended] == [1, 1, 1, 0, 0, 0]


# Comparing -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def episode() -> replay.RecordedEpisode:
    """Ten steps and more, of which the first three were not seen."""
    policy, weights = policy_for(WALK)
    place = {"seed": 5, "purpose": "episode", "lane": 0, "width": 4, "env": WALK.to_record()}
    with replay.RecordingEngine() as engine:
        engine.submit(tasks.episodes, place, policy.to_record(), weights, {"episodes": 20}).result()
        whole = next(e for e in engine.ended if e.length >= 10 and e.terminated)
    return dataclasses.replace(whole, observations=whole.observations[3:], rewards=whole.rewards[3:])


def changed(array: np.ndarray, at: Any) -> np.ndarray:
    copy = array.copy()
    copy[at] = np.nextafter(copy[at], np.float32(np.inf))
    return copy


def test_one_bit_is_noticed_and_named(episode: replay.RecordedEpisode) -> None:
    def verdict(**changes: Any) -> tuple[int, str]:
        played = replay.replay_episode(dataclasses.replace(episode, **changes), WALK)
        return played.step, played.difference

    last = episode.length - 1
    assert verdict()[1] == ""
    step, words = verdict(rewards=changed(episode.rewards, 2))
    assert step == 5
    assert re.fullmatch(r"the reward is (\S+) alone and (?!\1 )\S+ in the lane", words)
    step, words = verdict(observations=changed(episode.observations, (0, 1)))
    assert step == 2, "what the first seen step acted on came of the last unseen one"
    assert re.fullmatch(
        r"observation\[1\] is (\S+) alone and (?!\1 )\S+ in the lane \(1 of 3 numbers differ\)", words
    )  # fmt: skip
    assert verdict(observations=changed(episode.observations, (-1, 0)))[0] == last, "the final one"
    assert verdict(terminated=False) == (last, "it terminated alone and was truncated in the lane")
    step, words = verdict(total=float(np.nextafter(episode.total, np.inf)))
    assert (step, words[:13]) == (last, "the return is"), "the only trace of the rewards that were not seen"
    longer = {"actions": [*episode.actions, 0], "rewards": episode.rewards}
    longer["observations"] = episode.observations
    assert verdict(**longer)[1] != ""
    shorter = {"actions": episode.actions[:-1], "rewards": episode.rewards[:-1]}
    shorter["observations"] = episode.observations[:-1]
    assert verdict(**shorter) == (last - 1, "it went on alone and terminated in the lane")
    assert verdict(seed=episode.seed + 1)[1] != ""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("reward", r"the reward is \S+ alone and \S+ in the lane"),
        ("observation", r"observation\[1\] is \S+ alone and \S+ in the lane \(1 of 3 numbers differ\)"),
        ("ends", "it terminated alone and went on in the lane"),
        ("goes on", "it went on alone and (terminated|was truncated) in the lane"),
        ("raises", r"it raised RuntimeError alone and not in the lane\n\nTraceback(.|\n)*the simulation diverged\n"),
    ],
)
def test_an_environment_that_differs_alone(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toys.Crowded, "made", 0)
    tasks.idle.clear()
    env = EnvSpec(
        "tests.support.toys:Crowded-v0", {"how": how, "many": 5}
    )  # one to look at its spaces, and the lane's four
    policy, weights = policy_for(env)
    place = {"seed": 5, "purpose": "episode", "lane": 0, "width": 4, "env": env.to_record()}
    with replay.RecordingEngine() as engine:
        engine.submit(tasks.episodes, place, policy.to_record(), weights, {"episodes": 4}).result()
        episode = max(engine.ended, key=lambda episode: episode.length)
    assert episode.length > 3
    played = replay.replay_episode(episode, env)
    assert played.step == (episode.length - 1 if how == "goes on" else 2)
    assert re.fullmatch(message, played.difference)
    assert replay.check_command(env).startswith('shoal check-env tests.support.toys:Crowded-v0 --env-kwargs \'{"how": ')


# The command -----------------------------------------------------------------------------------------------------


def shoal(*words: str, cwd: Path, typed: str = "") -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shoal", *words],
        cwd=cwd, text=True, env=environment, capture_output=True, input=typed, check=False, timeout=110,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.processes
def test_list_play_and_save_while_the_run_is_held(shared_run: RunDir, tmp_path: Path) -> None:
    found, _ = again(shared_run, 3)
    where = shared_run.path.parents[1]
    table = tmp_path / "episode.csv"
    number, wanted = next((n, e) for n, e in enumerate(found.episodes) if e.unseen)
    with shared_run.lock():
        before = contents(shared_run)
        code, out, err = shoal("replay", "mine", "--iteration=3", cwd=where)
        assert (code, err) == (0, "")
        rows = [line.split() for line in out.splitlines()[2:]]
        assert rows == [
            [str(n), str(e.lane), str(e.slot), str(e.number), str(e.seed), str(e.length), f"{e.total:.6g}", e.end]
            for n, e in enumerate(found.episodes)
        ]
        words = ["replay", "mine", "--iteration=3", f"--episode={number}", f"--save={table}"]
        code, out, err = shoal(*words, cwd=where)
        assert (code, err) == (0, "")
        assert contents(shared_run) == before, "a replay only reads"
    assert out.splitlines()[0] == "Learning iteration 3 again, from the checkpoint of 2"
    assert f"slot {wanted.slot}, episode {wanted.number} of the slot, reset seed {wanted.seed}" in out
    assert f"Equal: {wanted.length} steps, return {wanted.total}, {wanted.end}" in out
    assert f"Only the actions of its first {wanted.unseen} steps, before that checkpoint, are known" in out

    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == [
        "step", "observation_0", "observation_1", "observation_2", "action", "reward", "terminated", "truncated"
    ]  # fmt: skip
    assert len(rows) == 1 + wanted.length
    env = make_env(WALK)
    observation, _ = env.reset(seed=wanted.seed)
    for step, row in enumerate(rows[1:]):
        assert row[0] == str(step)
        np.testing.assert_array_equal(np.array(row[1:4], np.float32), observation)
        observation, reward, terminated, truncated, _ = env.step(int(row[4]))
        assert row[5:] == [repr(float(reward)), str(terminated), str(truncated)]
    assert list(tmp_path.iterdir()) == [table], "nothing is left beside it"


@pytest.mark.processes
def test_debugger(shared_run: RunDir) -> None:
    where = shared_run.path.parents[1]
    found, _ = again(shared_run, 3)
    wanted = found.episodes[0]
    words = ["replay", "mine", "--iteration=3", "--episode=0", "--pdb"]
    typed = "p 'action', int(action)\np 'steps', env.unwrapped.steps\ns\ns\ns\nw\nc\n"
    code, out, err = shoal(*words, cwd=where, typed=typed)
    assert (code, err) == (0, "")
    assert f"('action', {int(wanted.actions[0])})" in out
    assert "('steps', 0)" in out, "before the first step"
    assert re.search(
        r"lane.py\(\d+\)play_alone\(\)\n-> .* = env.step\(action\)\n(> .*toys|.*toys).py\(\d+\)step\(\)", out
    )
    assert f"Equal: {wanted.length} steps" in out

    code, out, _ = shoal(*words, "--at=2", cwd=where, typed="p 'steps', env.unwrapped.steps\nq\n")
    assert code == 1
    assert "('steps', 2)" in out
    assert "You left the debugger before the end" in out
    assert "Equal" not in out


@pytest.mark.processes
def test_debugger_where_the_environment_raises(tmp_path: Path) -> None:
    """It raises alone and not in the lane: one was made for its spaces before, and four for the lanes."""

    def as_new() -> None:
        toys.Crowded.made = 0
        tasks.idle.clear()

    as_new()
    env = {"env": "tests.support.toys:Crowded-v0", "env_kwargs": json.dumps({"how": "raises", "many": 5})}
    folder = trained(tmp_path / "runs", "trpo", TRPO | {"batch": "episodes"}, iterations=1, **env)
    as_new()
    number = next(number for number, found in enumerate(again(folder, 1)[0].episodes) if found.length > 3)
    words = ["replay", "mine", "--iteration=1", f"--episode={number}", "--pdb"]
    code, out, err = shoal(*words, cwd=tmp_path, typed="c\np 'steps', self.steps\nq\n")
    assert (code, err) == (1, "")
    assert "('steps', 3)" in out
    assert "DIFFERENT from step 2 on: it raised RuntimeError alone and not in the lane" in out


@pytest.mark.processes
def test_environments_that_break_the_rules(tmp_path: Path) -> None:
    words = ["replay", "mine", "--iteration=1", "--episode=7", "--save=episode.csv"]
    trained(tmp_path / "runs", "trpo", TRPO | {"batch": "episodes"}, "tests.support.toys:Careless-v0", iterations=1)
    code, out, err = shoal(*words, cwd=tmp_path)
    assert (code, err) == (1, "")
    assert re.search(r"DIFFERENT: iteration 1 has the digest \w+ now and \w+ in the run; what differs: .*value", out)
    assert "run: shoal check-env tests.support.toys:Careless-v0" in out
    assert not (tmp_path / "episode.csv").exists()

    shutil.rmtree(tmp_path / "runs")
    tasks.idle.clear()
    trained(tmp_path / "runs", "trpo", TRPO | {"batch": "episodes"}, "tests.support.toys:Sticky-v0", iterations=1)
    code, out, err = shoal(*words, cwd=tmp_path)
    assert (code, err) == (1, "")
    assert re.search(r"DIFFERENT from the reset on: observation\[0\] is \S+ alone and \S+ in the lane \(3 of 3", out)
    assert "run: shoal check-env tests.support.toys:Sticky-v0" in out
    assert "run: shoal replay mine --iteration 1 --episode 7 --pdb --at 0" in out
    assert (tmp_path / "episode.csv").exists(), "the episode as it was alone"


def test_other_versions_are_said(copy: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    copy.config_file.write_text(copy.config_file.read_text().replace('"jax": "', '"jax": "0.0.'))
    assert again(copy, 1)[0].difference == ""
    assert re.search(r"the run was started with other versions.*jax 0\.0\.\S+ then, \S+ now", caplog.text)


@pytest.mark.processes
def test_mistakes(shared_run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "there.csv").touch()
    count = len(again(shared_run, 3)[0].episodes)
    mine = str(shared_run.path)
    for words, messages in (
        (
            ["none", "--iteration=1", "--at=3"],
            ["there is no run 'none' in runs", "--at sets the step before which --pdb stops"],
        ),
        (
            [mine, "--iteration=9", "--save=there.csv"],
            ["for one episode: choose it", "there.csv exists already", "no iteration 9: it has 1 to 4"],
        ),
        (
            [mine, "--iteration=3", f"--episode={count}", "--save=no/a.txt"],
            [
                "as a .csv file",
                "there is no folder no",
                f"no episode {count}: {count} ended in it, 0 to {count - 1}",
            ],
        ),
        ([mine, "--iteration=3", "--episode=0", "--pdb", "--at=99"], ["the episode has no step 99: use --at 0 to"]),
    ):
        code, out, err = shoal("replay", *words, cwd=tmp_path)
        assert code == 2
        assert [message for message in messages if message not in err] == []
        assert "Traceback" not in err
        assert ("Learning" in out) == ("--pdb" in words), "most are found before anything is learned again"
    for iteration, number, message in ((0, None, "no iteration 0"), (5, 0, "no iteration 5"), (3, -1, "no episode -1")):
        (problem,) = replay.replay_problems(shared_run, iteration, number)
        assert message in problem
    assert replay.replay_problems(shared_run, 3, count - 1) == []


def test_an_iteration_without_an_ended_episode(copy: RunDir, tmp_path: Path) -> None:
    lines = copy.metrics()
    for line, total in zip(lines, (0, 3, 3, 5), strict=True):
        line["rollout/episodes"] = total
    copy.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    hint = ". The nearest iterations with one: 2, 4"
    assert replay.replay_problems(copy, 1, None) == [f"no episode ended in iteration 1{hint}"]
    assert replay.replay_problems(copy, 3, 0) == [f"no episode ended in iteration 3{hint}"]
    assert replay.replay_problems(copy, 2, 2) == replay.replay_problems(copy, 2, None) == []
    copy.metrics_file.write_text("")
    assert replay.replay_problems(copy, 1, None) == ["the run mine has no iteration 1: it has none yet"]

    quick = PPO | {"batch_steps": 8}  # one step of each slot: nothing ends in the first iteration, or counts as ended
    short = trained(
        tmp_path / "short",
        "ppo",
        quick | {"minibatch": 8},
        "shoal.testing.environments:testing/Identity-v0",
        iterations=1,
    )
    with pytest.raises(UsageError, match="no episode ended in iteration 1"):
        again(short, 1)
