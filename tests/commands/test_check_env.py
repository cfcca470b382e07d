"""Environments that keep the rules, and those that are known to break one: each is found out by the right verdict."""

import re
from pathlib import Path

import pytest

from shoal.commands.check_env import env_verdicts
from shoal.envs.make import EnvSpec
from tests.support.cli import shoal

pytestmark = pytest.mark.processes

RULES = {"same seed, same episode", "alone and after other episodes", "replay of its actions", "in another process"}


def broken(env_id: str, **options: object) -> dict[str, str]:
    verdicts = list(env_verdicts(EnvSpec(env_id, **options), seconds=0.5))  # type: ignore[arg-type]
    assert RULES | {"spaces", "interface", "episodes end", "speed", "suits", "memory"} <= {v.what for v in verdicts}
    return {verdict.what: verdict.detail for verdict in verdicts if verdict.works is False}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "LunarLander-v3", "tests.support.toys:Walk-v0"])
def test_well_behaved(env_id: str) -> None:
    assert broken(env_id) == {}


@pytest.mark.parametrize(
    ("env_id", "rules", "words"),
    [
        ("tests.support.toys:Careless-v0", RULES, "not reproducible"),
        ("tests.support.toys:Whim-v0", RULES, "not reproducible"),
        (
            "tests.support.toys:Sticky-v0",
            {"alone and after other episodes", "replay of its actions"},
            "--recreate-after 1",
        ),
        ("tests.support.toys:Local-v0", {"in another process"}, "depend on where an episode runs"),
        ("tests.support.toys:Leaky-v0", {"memory"}, r"MB per 1,000 episodes.*--recreate-after \d+"),
        ("tests.support.toys:Liar-v0", {"interface"}, "outside its space .dtype float64"),
    ],
)
def test_broken_rules_are_named(env_id: str, rules: set[str], words: str) -> None:
    found = broken(env_id)
    assert set(found) == rules
    assert re.search(words, " ".join(found.values()))


@pytest.mark.parametrize(
    ("env_id", "kwargs", "words"),
    [
        ("Trouble-v0", {"how": "raises"}, r"step 3 after reset\(seed=0\) raised RuntimeError: the simulation diverged"),
        ("Trouble-v0", {"how": "old"}, r"step 3 after reset\(seed=0\) returned 4 values, not 5"),
        ("Trouble-v0", {"how": "no reward"}, r"step 3 after reset\(seed=0\) returned the reward None"),
        ("Homesick-v0", {}, r"in another process, .* raised Unusable: step 1 .* RuntimeError: no display"),
        ("Unseeded-v0", {}, r"reset\(seed=0\) raised TypeError: .*seed"),
    ],
)
def test_what_cannot_be_used_is_said_and_ends_the_check(env_id: str, kwargs: dict[str, str], words: str) -> None:
    *_, last = env_verdicts(EnvSpec(f"tests.support.toys:{env_id}", kwargs))
    assert (last.what, last.works) == ("works at all", False)
    assert re.match(words, last.detail)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nan reward", "a reward is nan"),
        ("nan observation", "observation that is not finite"),
        ("no info", "step returns info of type NoneType, not a dict"),
    ],
)
def test_what_is_returned_is_looked_at_late_in_an_episode_too(how: str, words: str) -> None:
    found = broken("tests.support.toys:Trouble-v0", kwargs={"how": how, "at": 11})
    assert set(found) == {"interface"}
    assert words in found["interface"]


def test_few_resets_do_not_make_a_verdict_on_memory() -> None:
    (memory,) = (v for v in env_verdicts(EnvSpec("tests.support.toys:Slow-v0"), seconds=0.5) if v.what == "memory")
    assert memory.works is None
    assert re.match(r"not measured: \d+ resets are too few\. Try --seconds \d+", memory.detail)


def test_never_ending() -> None:
    found = broken("tests.support.toys:Trouble-v0", kwargs={"how": "never ends"})
    assert set(found) == {"episodes end"}
    assert "--max-episode-steps" in found["episodes end"]
    assert broken("tests.support.toys:Trouble-v0", kwargs={"how": "never ends"}, max_episode_steps=20) == {}


def test_command(tmp_path: Path) -> None:
    code, out, _ = shoal("check-env", "CartPole-v1", "--seconds=0.5", cwd=tmp_path)
    assert code == 0
    assert re.search(r"ok +replay of its actions +equal", out)
    assert re.search(r"speed +\d+ µs a step", out)
    code, out, _ = shoal("check-env", "tests.support.toys:Careless-v0", "--seconds=0.5", cwd=tmp_path)
    assert code == 1
    assert "FAIL same seed, same episode" in out
    assert shoal("check-env", "Nope-v0", cwd=tmp_path)[0] == 2
    code, _, err = shoal("check-env", "CartPole-v1", "--seconds=0", cwd=tmp_path)
    assert (code, "seconds must be above 0" in err) == (2, True)
