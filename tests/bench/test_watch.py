"""Sides as real processes: a peer's script, and Shoal itself."""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from bench import ppo
from bench.contest import Entry, contest, contest_table
from bench.peers import REQUIREMENTS, Peers, blocks
from bench.rounds import SideFailed
from bench.watch import TrainingProgram, rate, reach

pytestmark = pytest.mark.processes

HERE = {**os.environ}

# A peer whose clock is its own: 100 steps and 0.5 s per iteration; 10 s more for the second, as if it compiled.
STEADY = """
import json, sys, time
job = json.loads(sys.argv[1])
print("something that is no line")
for number in range(1, job["iterations"] + 1):
    line = {"steps": 100 * number, "seconds": 0.5 * number + 10 * (number > 1), "return": 10 * number}
    print(json.dumps(line), flush=True)
if job["fails"]:
    sys.exit("ValueError: it went wrong")
if job["hangs"]:
    time.sleep(60)
"""


class Here(Peers):
    """Peers in this very Python: nothing is installed."""

    def __init__(self, missing: str | None = None) -> None:
        self.python, self.missing = Path(sys.executable), missing


def peer(folder: Path, iterations: int = 10, fails: bool = False, hangs: bool = False) -> TrainingProgram:
    script = folder / "steady.py"
    script.write_text(STEADY)
    return Here().program(str(script), {"iterations": iterations, "fails": fails, "hangs": hangs})


def test_rate_counts_whole_iterations_after_the_first(tmp_path: Path) -> None:
    assert rate(peer(tmp_path), seconds=1.2, warm=2) == 200
    assert rate(peer(tmp_path, fails=True), seconds=1.2) == 200, "how it ends later does not matter"


def test_rate_needs_its_window(tmp_path: Path) -> None:
    with pytest.raises(SideFailed, match="ended before 5 s of steady training"):
        rate(peer(tmp_path), seconds=5)


def test_score_is_reached_at_the_first_line_that_has_it(tmp_path: Path) -> None:
    reached = reach(peer(tmp_path, hangs=True), score=40, cap=60)
    assert reached.steps == 400
    assert 0 < reached.seconds < 60
    with pytest.raises(SideFailed, match=re.escape("not within 1,000 steps: 100 at best")):
        reach(peer(tmp_path), score=101, cap=60)
    with pytest.raises(SideFailed, match=re.escape("not within 1 s and 1,000 steps: 100 at best")):
        reach(peer(tmp_path, hangs=True), score=101, cap=1)


def test_a_process_that_fails_hangs_or_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SideFailed, match=r"^ValueError: it went wrong$"):
        rate(peer(tmp_path, iterations=1, fails=True), seconds=1)
    with pytest.raises(SideFailed, match="no progress in 1 s; last output: something that is no line"):
        rate(peer(tmp_path, iterations=1, hangs=True), seconds=1, patience=1)
    with pytest.raises(SideFailed, match="No such file"):
        rate(TrainingProgram([str(tmp_path / "nothing")], HERE), seconds=1)
    with pytest.raises(SideFailed, match="exit code 3 without any output"):
        rate(TrainingProgram([sys.executable, "-c", "raise SystemExit(3)"], HERE), seconds=1)


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, json, time; p = subprocess.Popen(['sleep', '100']);"
        "print(json.dumps({'steps': p.pid, 'seconds': 0}), flush=True); time.sleep(100)"
    )
    with TrainingProgram([sys.executable, "-c", code], HERE).running() as lines:
        child = psutil.Process(next(lines).steps)
        assert child.is_running()
    assert not psutil.wait_procs([child], timeout=15)[1]


def test_peers_get_their_own_surroundings(tmp_path: Path) -> None:
    code = (
        "import os, json; keys = ('PYTHONPATH', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'NPROC');"
        "print(json.dumps({'steps': [os.environ.get(key) for key in keys], 'seconds': os.environ['HOME']}))"
    )
    script = tmp_path / "look.py"
    script.write_text(code)
    for threads, expected in ((None, None), (1, "1")):
        with Here().program(str(script), {}, threads).running() as lines:
            line = next(lines)
        assert line.steps == [None, expected, None, None]
        assert str(line.seconds) != os.environ.get("HOME")
        assert not Path(str(line.seconds)).exists(), "what it wrote at home is gone"


def test_contest_of_shoal_and_peers_that_fail(tmp_path: Path) -> None:
    """Shoal is really measured; a peer that fails and one that was not installed are reported."""
    ours = ppo._entries("CartPole-v1", Here())[0]
    entries = [ours, Entry("Broken", {"as it is": peer(tmp_path, iterations=1, fails=True)})]
    said: list[str] = []
    outcome = contest("CartPole-v1", entries, Here(), count=1, seconds=0.5, quick=True, say=said.append)
    (found,) = outcome.rounds
    bare, speed = found["2 bare processes"], found["Shoal"]
    assert isinstance(bare, float)
    assert isinstance(speed, float), speed
    assert 100 < speed < bare, "training is slower than the environment alone"
    assert "as it is; failed in 1 of 1 rounds: ValueError: it went wrong" in contest_table([outcome])

    missing = Here(missing="not installed: no space left")
    quiet = [Entry("Ours", {"one": peer(tmp_path)}, peer=False), Entry("Gone", {"one": peer(tmp_path)})]
    outcome = contest("CartPole-v1", quiet, missing, count=1, seconds=0.1, quick=True, say=said.append)
    assert outcome.rounds[0]["Ours"] == 200
    assert "failed in 1 of 1 rounds: not installed: no space left" in contest_table([outcome])


def test_settings_are_scouted_unless_quick(tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    fast.mkdir()
    quick_script = fast / "steady.py"
    quick_script.write_text(STEADY.replace("100 * number", "300 * number"))
    job = {"iterations": 10, "fails": False, "hangs": False}
    settings = {"slow": peer(tmp_path), "fast": Here().program(str(quick_script), job)}
    for quick, name, speed in ((True, "slow", 200), (False, "fast", 600)):
        outcome = contest("CartPole-v1", [Entry("It", settings)], Here(), 1, 0.1, quick, lambda _: None)
        assert (outcome.chosen["It"], outcome.rounds[0]["It"]) == (name, speed)


def test_requirements_are_blocks_with_torch_first() -> None:
    first, *rest = blocks(REQUIREMENTS.read_text())
    assert first == ["torch==2.13.0"]
    assert all(re.fullmatch(r"[\w-]+(\[[\w,]+\])?==[\d.]+", line) for block in rest for line in block)
    assert any("stable-baselines3" in line for block in rest for line in block)


def test_peers_that_cannot_be_installed_are_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    said: list[str] = []
    peers = Peers(tmp_path / "peers", said.append)
    assert peers.missing is not None
    assert re.search("No matching distribution found for torch==2.13.0", peers.missing)
    assert not (tmp_path / "peers/shoal-peers").exists()
    assert peers.versions() == {}
    with pytest.raises(SideFailed, match="torch"):
        peers.check()
