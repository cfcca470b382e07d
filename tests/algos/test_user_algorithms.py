"""Algorithms outside Shoal: found by module, file or entry point, and run like the built-in ones."""

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import algos
from shoal.base import seeding
from shoal.errors import UsageError
from shoal.runs.folder import RunDir
from shoal.testing.algorithms import AlgorithmContract
from tests.support.cli import ROOT, shoal

A2C = ROOT / "examples" / "a2c.py"
SMALL = ("--lanes=2", "--width=4", "--hidden", "8", "--no-tensorboard")

CONFIG = """
from dataclasses import dataclass, field
from shoal.algos.base import AlgorithmConfig, Step

@dataclass(frozen=True)
class Config(AlgorithmConfig):
    lanes: int = 1
"""


@pytest.mark.trains
class TestA2C(AlgorithmContract):
    algorithm = algos.load(str(A2C))
    config = algorithm.Config(lanes=2, width=4, hidden=(16,))  # type: ignore[call-arg]
    learner = algorithm.Config(lanes=2, width=8, hidden=(16,), lr=1e-2, gamma=0.5)  # type: ignore[call-arg]
    iterations = 120
    invalid = {"lr": -1.0, "gamma": 2.0, "hidden": (0,), "lanes": 0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules that can be imported during a test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it has no class Config"),
        ("class Config: pass\ndef train(): pass", "must be a class that derives from"),
        (CONFIG, "it has no function train"),
        (CONFIG.replace("lanes: int = 1", "lr: float = 1") + "train = print", "does not define lanes"),
        (CONFIG + "    depth: int = field(kw_only=True)\ntrain = print", "'depth' of Config needs a default"),
        (CONFIG.replace("@dataclass(frozen=True)", "") + "train = print", "must be a dataclass"),
        ("1 / 0", "ZeroDivisionError"),
        ("import missing_module_of_a_user", "No module named 'missing_module_of_a_user'"),
    ],
)
def test_a_module_that_is_no_algorithm_is_refused(folder: Path, content: str, message: str) -> None:
    (folder / "broken_algorithm.py").write_text(content)
    for name in ("broken_algorithm", str(folder / "broken_algorithm.py")):
        with pytest.raises(UsageError, match=message):
            algos.load(name)


def test_names_that_lead_nowhere_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean ppo"):
        algos.load("pppo")
    with pytest.raises(UsageError, match=r"there is no algorithm 'no_package\.a2c'"):
        algos.load("no_package.a2c")
    with pytest.raises(UsageError, match="there is no file"):
        algos.load("./no_such_file.py")
    (folder / "json.py").write_text(CONFIG + "train = print")
    with pytest.raises(UsageError, match="hidden by another module 'json'"):
        algos.load(str(folder / "json.py"))


def test_module_file_and_entry_point_are_the_same_algorithm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "user_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "quick.py").write_text(CONFIG + "train = print")
    point = importlib.metadata.EntryPoint("quick", "user_package.quick", algos.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (point,) if group == point.group else ())
    found = [algos.load(name) for name in ("user_package.quick", str(package / "quick.py"), "quick")]
    assert found[0] is found[1] is found[2]
    assert {algos.short_name(name) for name in ("user_package.quick", str(package / "quick.py"))} == {"quick"}


def test_purposes_of_users_have_their_own_streams() -> None:
    keys = {("a2c/noise", 1), ("a2c/noise", 2), ("other/noise", 1), ("noise", 1), ("a2c/value", 1)}
    drawn = {float(seeding.rng(0, purpose, at).random()) for purpose, at in keys}
    assert len(drawn) == len(keys)
    assert seeding.integer(3, "a2c/noise", 7) == seeding.integer(3, "a2c/noise", 7)
    for purpose in ("unknown", "/noise", "a2c/"):
        with pytest.raises(ValueError, match="purpose of your own"):
            seeding.rng(0, purpose)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    yield 3", "yielded a int (3)"),
        ("    yield Step({}, {}, dict, None)", "lack time/total_timesteps"),
        ("    return\n    yield", "ended after 0 iterations"),
    ],
)
def test_steps_that_break_the_contract_are_refused(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(f"{CONFIG}def train(*args):\n{body}\n")
    code, _, err = shoal("train", "./odd.py", "CartPole-v1", "--engine=serial", cwd=tmp_path)
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.processes
def test_every_command_works_from_any_folder(tmp_path: Path) -> None:
    """Train by file; resume, evaluate and replay from another folder; changed code is reported."""
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    (home / "mine.py").write_text(A2C.read_text())
    train = ("train", "./mine.py", "CartPole-v1", "--iterations=4", "--workers=2", "--name=x", *SMALL)
    code, out, err = shoal(*train, cwd=home)
    assert code == 0, err
    run = RunDir(home / "runs" / "x")
    assert json.loads(run.config_file.read_text())["algo"] == str(home / "mine.py")
    for words in (
        ("evaluate", str(run.path), "--episodes=2"),
        ("replay", str(run.path), "--iteration=2", "--episode=0"),
        ("resume", str(run.path), "--iterations=6"),
    ):
        code, out, err = shoal(*words, cwd=away)
        assert code == 0, (words, out, err)
    code, out, _ = shoal("train", str(home / "mine.py"), "--help", cwd=away)
    assert "--fragment-steps" in out
    assert "Coefficient of the entropy bonus" in out
    (home / "mine.py").write_text(A2C.read_text() + "\n# changed\n")
    code, out, err = shoal("resume", str(run.path), "--iterations=7", cwd=away)
    assert code == 0
    assert "algorithm " in out
    assert "so its bits may differ" in out


@pytest.mark.processes
def test_compare_takes_users_algorithms(tmp_path: Path) -> None:
    words = ("compare", "CartPole-v1", "--algos", str(A2C), "ppo", "--seeds=1", "--steps=2000", "--set", "a2c.hidden=8")
    code, out, err = shoal(*words, cwd=tmp_path)
    assert code == 0, out + err
    assert "a2c" in out


VERIFY = ("--iterations=4", "--kill-workers", "--kill-head")


@pytest.mark.processes
def test_results_are_equal_on_local_engines(tmp_path: Path) -> None:
    engines = "--engines=serial,processes:3"
    code, out, err = shoal("verify", str(A2C), "CartPole-v1", engines, *VERIFY, *SMALL, cwd=tmp_path)
    assert code == 0, out + err
    assert "Equal" in out


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mpi:2", "ray:2", "redis:2"])
def test_results_are_equal_on_every_engine(engine: str, tmp_path: Path) -> None:
    engines = f"--engines=serial,{engine}"
    code, out, err = shoal("verify", str(A2C), "CartPole-v1", engines, *VERIFY, *SMALL, cwd=tmp_path)
    assert code == 0, out + err
    assert "Equal" in out
