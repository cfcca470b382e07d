"""Searches as a user meets them: `shoal train es`, `shoal train nevergrad`, and what goes with them."""

import shutil
from pathlib import Path

import pytest

from shoal.runs.folder import RunDir
from tests.support.cli import shoal

pytestmark = pytest.mark.processes

SMALL = ["--population=8", "--tasks=3", "--width=2", "--score-episodes=2", "--workers=2"]
WALK = "tests.support.toys:Walk-v0"


def last_digest(cwd: Path, name: str) -> str:
    return str(RunDir(cwd / "runs" / name).metrics()[-1]["digest"])


@pytest.mark.slow
@pytest.mark.parametrize("algo", [["es", "--normalise"], ["nevergrad", "--optimizer=DE"]], ids=["es", "nevergrad"])
def test_verify_with_every_fault(tmp_path: Path, algo: list[str]) -> None:
    name, *own = algo
    words = ["verify", name, WALK, *own, *SMALL, "--hidden", "4", "--memory=elman", "--iterations=3"]
    code, out, err = shoal(*words, "--engines=serial,processes:2", "--kill-workers", "--kill-head", cwd=tmp_path)
    assert code == 0, out + err
    assert "Equal: all 5 ways" in out


def test_start_from_a_saved_policy_and_resume(tmp_path: Path) -> None:
    code, out, _ = shoal("train", "es", WALK, *SMALL, "--iterations=2", "--name=first", cwd=tmp_path)
    assert code == 0
    assert "Return:" in out
    second = ["train", "es", WALK, *SMALL, "--from=first", "--name=second"]
    assert shoal(*second, "--iterations=4", cwd=tmp_path)[0] == 0
    # The first run learns on, and the third, which has lost its checkpoint, starts again from the policy that it had.
    third = [*second[:-1], "--name=third", "--iterations=2"]
    assert shoal(*third, cwd=tmp_path)[0] == 0
    assert shoal("resume", "first", "--iterations=3", cwd=tmp_path)[0] == 0
    shutil.rmtree(tmp_path / "runs/third/checkpoints/000002")
    assert shoal("resume", "third", "--iterations=4", "--workers=1", cwd=tmp_path)[0] == 0
    assert last_digest(tmp_path, "second") == last_digest(tmp_path, "third")
    verify = ["verify", "es", WALK, *SMALL[:-1], "--from=first", "--iterations=1", "--engines=serial,processes:1"]
    code, out, err = shoal(*verify, cwd=tmp_path)
    assert code == 0, out + err
    code, _, err = shoal("replay", "first", "--iteration=1", cwd=tmp_path)
    assert code == 2
    assert "send only scores" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "es", WALK, "--from=nobody", "--population=7"], "population must be even, there is no run 'nobody'"),
        (["train", "es", WALK, "--from=none.safetensors"], "none.safetensors of --from"),
        (["train", "es", "CartPole-v1", "--vector=gymnasium"], "vector is for fragments, and es plays scores here"),
        (
            ["train", "ppo", "CartPole-v1", "--batch=episodes", "--lr-schedule=linear", "--iterations=6"],
            "how many 6 iterations of whole episodes take is not known in advance: use --steps N",
        ),
        (["train", "ppo", WALK, "--memory=lstm"], "Unrecognized"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    code, out, err = shoal(*words, cwd=tmp_path)
    assert code == 2
    assert all(part in out + err for part in message.split(", "))
    assert "Traceback" not in err
    assert not list(tmp_path.glob("runs/*"))
