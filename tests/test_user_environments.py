"""Environments and wrappers as users have them: classes, functions, scripts, notebooks; no registration."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from shoal.engines import user_code
from shoal.envs.make import EnvSpec, make_env, time_limit
from shoal.envs.wrappers import Wrapper
from shoal.errors import EnvironmentFault, UsageError
from shoal.policies.observations import Flattener
from tests.support import grid, tasks
from tests.support.cli import ROOT
from tests.support.cli import shoal as command

GRID = "tests.support.grid:GridWorld"
SMALL: dict[str, Any] = {"batch_steps": 64, "lanes": 2, "width": 2, "hidden": (8,), "iterations": 1, "preset": False}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.trains
def test_a_class_its_name_and_a_function_are_the_same_environment() -> None:
    digests = {
        shoal.train("ppo", env, engine="serial", **SMALL, **kwargs).digest
        for env, kwargs in (
            (GRID, {"env_kwargs": {"size": 3}}),
            (grid.GridWorld, {"env_kwargs": {"size": 3}}),
            (grid.make_grid, {}),
        )
    }
    assert len(digests) == 1


@pytest.mark.trains
def test_a_loaded_policy_takes_the_observations_of_its_environment() -> None:
    run = shoal.train("ppo", grid.GridWorld, engine="serial", **SMALL)
    env, flat = grid.GridWorld(), make_env(EnvSpec(GRID))
    seen = [env.reset(seed=seed)[0] for seed in range(5)]
    rows = np.array([flat.reset(seed=seed)[0] for seed in range(5)])
    policy = shoal.load(run)
    single = [policy.act(one) for one in seen]
    assert {type(action) for action in single} <= {int, np.int64}
    batch = {key: [one[key] for one in seen] for key in seen[0]}
    np.testing.assert_array_equal(policy.act(seen), single)
    np.testing.assert_array_equal(policy.act(batch), single)
    np.testing.assert_array_equal(rows, [Flattener(env.observation_space)(one) for one in seen])


def test_flat_observations_are_written_out_by_hand() -> None:
    flat = Flattener(grid.GridWorld.observation_space)
    observation = {"at": 2, "hint": "ab", "size": np.array([3.0, 0.5], np.float32)}
    codes = [10 + 26, 11 + 26]  # after ten digits and 26 capitals
    expected = [0, 0, 1, 0, 0, *codes, 62, 62, 62, 62, 3.0, 0.5]
    np.testing.assert_array_equal(flat(observation), expected)
    np.testing.assert_array_equal(Flattener.from_record(flat.to_record())(observation), expected)


@pytest.mark.parametrize(
    ("space", "observation", "batch"),
    [
        (gymnasium.spaces.Discrete(3, start=5), 6, np.array([6, 6])),
        (gymnasium.spaces.MultiDiscrete([2, 3]), np.array([1, 2]), np.array([[1, 2], [1, 2]])),
        (gymnasium.spaces.MultiBinary(3), np.array([1, 0, 1]), np.array([[1, 0, 1]] * 2)),
        (gymnasium.spaces.Text(4), "abc", ["abc", "abc"]),
        (
            gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)]),
            (1, np.ones((2, 2), np.uint8)),
            ([1, 1], np.ones((2, 2, 2), np.uint8)),
        ),
    ],
    ids=str,
)
def test_every_space_flattens_alone_in_a_batch_and_from_its_record(space: Any, observation: Any, batch: Any) -> None:
    flat = Flattener(space)
    again = Flattener.from_record(flat.to_record())
    (row,), single = again.rows(observation)
    rows, one = again.rows(batch)
    assert (single, one) == (True, False)
    np.testing.assert_array_equal(rows, [row, row])
    np.testing.assert_array_equal(row, gymnasium.spaces.utils.flatten(space, observation))


def test_spaces_without_a_size_are_refused() -> None:
    with pytest.raises(UsageError, match="its size is not fixed"):
        Flattener(gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2)))


def test_missions_of_minigrid_are_text() -> None:
    env = make_env(EnvSpec("minigrid:MiniGrid-Empty-5x5-v0"))
    observation, _ = env.reset(seed=0)
    assert observation.shape == (7 * 7 * 3 + 4 + 256,)
    assert env.observation_space.contains(observation)


# Wrappers -------------------------------------------------------------------------------------------------------


def test_wrappers_are_parsed() -> None:
    stack = Wrapper.parse("FrameStackObservation:4")
    assert (stack.place.name, stack.args, stack.kwargs) == ("FrameStackObservation", (4,), {})
    mine = Wrapper.parse("tests.support.grid:Scale:factor=0.5")
    assert (mine.place.module, mine.place.name, mine.kwargs) == ("tests.support.grid", "Scale", {"factor": 0.5})
    many = Wrapper.parse('ResizeObservation:[84, 84],interpolation=area,b={"c": [1, 2]}')
    assert (many.args, many.kwargs) == (([84, 84],), {"interpolation": "area", "b": {"c": [1, 2]}})


def test_wrappers_apply_in_order_and_see_the_time_limit() -> None:
    spec = EnvSpec(
        "CartPole-v1", wrap=["FrameStackObservation:3", "tests.support.grid:Scale:2", "TimeAwareObservation"]
    )
    assert time_limit(spec) is None, "Gymnasium's own wrapper keeps the time, inside the others"
    env = make_env(EnvSpec("CartPole-v1", {}, 5, wrap=["FrameStackObservation:3", "tests.support.grid:Scale:2"]))
    observation, _ = env.reset(seed=0)
    assert observation.shape == (3, 4)
    steps = [env.step(at % 2) for at in range(5)]
    assert [step[1] for step in steps] == [2.0] * 5
    assert [step[3] for step in steps] == [False] * 4 + [True]
    walk = make_env(EnvSpec(GRID, {}, 5, wrap=["tests.support.grid:Scale"]))
    walk.reset(seed=0)
    assert [walk.step(0)[3] for _ in range(5)] == [False] * 4 + [True]


# Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        ("tests.support.grid:GridWorl", {}, "has no class or function 'GridWorl' .* Did you mean .*GridWorld"),
        ("no_such_module:GridWorld", {}, "the module no_such_module cannot be imported"),
        ("./nowhere.py:GridWorld", {}, "there is no file .*nowhere.py"),
        (GRID, {"env_kwargs": {"speed": 3}}, "does not take --env-kwargs .*speed"),
        ("tests.support.grid:make_nothing", {}, "made NoneType, which is no gymnasium.Env"),
        ("CartPole-v1", {"wrap": ["FrameStackObservatio:4"]}, "no wrapper .* Did you mean FrameStackObservation"),
        ("CartPole-v1", {"wrap": ["tests.support.grid:Nothing"]}, "tests.support.grid has no wrapper 'Nothing'"),
        ("CartPole-v1", {"wrap": ["FrameStackObservation:many"]}, "--wrap FrameStackObservation:many raised"),
        ("CartPole-v1", {"wrap": ["tests.support.grid:Scale"], "vector": "gymnasium"}, "wrap cannot be combined"),
        (grid.GridWorld(), {}, "pass the class GridWorld"),
        (lambda: grid.GridWorld(2), {}, "is a lambda"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes(env: Any, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        shoal.train("ppo", env, engine="serial", **SMALL, **settings)
    assert not list(tmp_path.glob("runs/*"))


def test_an_environment_that_raises_when_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="raised ValueError when it was made: the line has 5 places, not 7"):
        shoal.train("ppo", grid.GridWorld, engine="serial", env_kwargs={"size": 7}, **SMALL)
    assert not list(tmp_path.glob("runs/*"))


# Scripts, notebooks, other folders and other users -----------------------------------------------------------------

SCRIPT = """
import shoal
from tests.support.grid import GridWorld

class Mine(GridWorld):
    pass

def play(seed):
    return Mine(seed).reset(seed=seed)[0]["at"]

if __name__ == "__main__":
    options = dict(batch_steps=64, lanes=2, width=2, hidden=(8,), iterations=2)
    print(shoal.train("ppo", Mine, engine="serial", **options).digest)
    print(shoal.train("ppo", Mine, engine="processes", workers=2, name="mine", **options).digest)
"""


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.processes
@pytest.mark.trains
def test_what_a_script_defines_works_on_local_engines_and_in_later_commands(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    (home / "script.py").write_text(SCRIPT)
    done = python("script.py", cwd=home)
    assert done.returncode == 0, done.stderr
    serial, processes = done.stdout.split()
    assert serial == processes
    code, out, err = command("evaluate", str(home / "runs/mine"), "--episodes=2", "--engine=serial", cwd=away)
    assert code == 0, out + err


@pytest.mark.processes
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    done = python("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr


@pytest.mark.processes
def test_what_an_interactive_session_defines_works_on_serial_only(tmp_path: Path) -> None:
    lines = SCRIPT.replace('"processes", workers=2', '"ray"')
    done = python("-c", lines, cwd=tmp_path)
    assert len(done.stdout.split()) == 1, "serial works"
    assert "%%writefile my_env.py" in done.stderr


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A folder with a module of the user, and a run that was trained in it."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(ROOT / "tests/support/grid.py", home / "my_grid.py")
    small = ["--batch-steps=64", "--lanes=2", "--width=2", "--hidden", "8", "--iterations=2", "--engine=serial"]
    code, _, err = command("train", "ppo", "my_grid:GridWorld", "--wrap=my_grid:Scale:3", *small, "--name=x", cwd=home)
    assert code == 0, err
    return home


@pytest.mark.processes
@pytest.mark.trains
def test_a_run_finds_its_module_from_any_folder_if_it_is_ours(module: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    run = module / "runs/x"
    (code, _, err) = command("resume", str(run), "--iterations=3", cwd=away)
    assert code == 0, err
    shutil.copy(run / "policy.safetensors", away / "alone.safetensors")
    code, _, err = command("evaluate", "alone.safetensors", "--episodes=2", "--engine=serial", cwd=away)
    assert code == 2
    assert "is not in the folder of a run, and names code to import" in err
    assert "--allow my_grid" in err
    alone = shoal.load(away / "alone.safetensors")
    assert alone.env["id"] == "my_grid:GridWorld", "loading imports nothing"
    with pytest.raises(UsageError, match="names code to import"):
        shoal.evaluate(alone, 2)
    if os.geteuid() == 0:
        os.chown(run / "config.json", 65534, 65534)
        code, _, err = command("resume", str(run), "--iterations=4", cwd=module)
        assert code == 2
        assert "belongs to another user, and names code to import" in err
    (module / "my_grid.py").write_text((module / "my_grid.py").read_text() + "\n# changed\n")
    code, out, err = command("evaluate", str(run), "--episodes=2", "--allow=my_grid", cwd=module)
    assert code == 0, err
    assert "the code of my_grid has changed since the policy was trained" in out
    code, out, err = command("resume", str(run), "--iterations=4", "--allow=my_grid", cwd=module)
    assert code == 0
    assert "code of my_grid" in out


@pytest.mark.processes
def test_a_worker_with_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """For environments and for functions: the head's digest is what counts."""
    monkeypatch.setattr(user_code, "_digest", lambda name: "0123456789ab")
    with shoal.engine("processes", 1) as engine:
        with pytest.raises(UsageError, match=r"the code of tests.support.tasks differs .*\(0123456789ab\)"):
            engine.submit(tasks.echo, 1).result()
    with pytest.raises(UsageError, match=r"the code of tests.support.grid differs"):
        shoal.train("ppo", GRID, workers=1, **SMALL)
    with shoal.engine("processes", 1, allow_mixed=True) as engine:
        assert engine.submit(tasks.echo, 1).result() == 1
