"""Environments that keep the rules, and those that are known to break one: each is found out by the right verdict."""

import re
from pathlib import Path

import pytest

from shoal.envs.check import check
from shoal.envs.make import EnvSpec
from tests.test_cli import shoal

RULES = {"same seed, same episode", "alone and after other episodes", "replay of its actions", "in another process"}


def broken(env_id: str, **options: object) -> dict[str, str]:
    verdicts = list(check(EnvSpec(env_id, **options), seconds=0.5))  # type: ignore[arg-type]
    assert RULES | {"spaces", "interface", "episodes end", "speed", "suits", "memory"} <= {v.what for v in verdicts}
    return {verdict.what: verdict.detail for verdict in verdicts if verdict.works is False}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "LunarLander-v3", "tests.toys:Walk-v0"])
def test_well_behaved(env_id: str) -> None:
    assert broken(env_id) == {}


@pytest.mark.parametrize(
    ("env_id", "rules", "words"),
    [
        ("tests.toys:Careless-v0", RULES, "not reproducible"),
        ("tests.toys:Sticky-v0", RULES, "--recreate-after 1"),
        ("tests.toys:Local-v0", {"in another process"}, "depend on where an episode runs"),
        ("tests.toys:Leaky-v0", {"memory"}, r"MB more for every 1,000 episodes.*--recreate-after \d+"),
        ("tests.toys:Liar-v0", {"interface"}, "outside of its space .dtype float64"),
    ],
)
def test_broken_rules_are_named(env_id: str, rules: set[str], words: str) -> None:
    found = broken(env_id)
    assert set(found) <= rules
    assert found
    assert re.search(words, " ".join(found.values()))


def test_never_ending() -> None:
    found = broken("tests.toys:Trouble-v0", kwargs={"how": "never ends"})
    assert set(found) == {"episodes end"}
    assert "--max-episode-steps" in found["episodes end"]
    assert broken("tests.toys:Trouble-v0", kwargs={"how": "never ends"}, max_episode_steps=20) == {}


def test_command(tmp_path: Path) -> None:
    code, out, _ = shoal("check-env", "CartPole-v1", "--seconds=0.5", cwd=tmp_path)
    assert code == 0
    assert re.search(r"ok +replay of its actions +equal", out)
    assert re.search(r"speed +\d+ µs a step", out)
    code, out, _ = shoal("check-env", "tests.toys:Careless-v0", "--seconds=0.5", cwd=tmp_path)
    assert code == 1
    assert "FAIL same seed, same episode" in out
    assert shoal("check-env", "Nope-v0", cwd=tmp_path)[0] == 2
