"""`shoal bench` as a command."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from bench import ALL, PARTS
from tests.support.cli import shoal, start

pytestmark = pytest.mark.processes

LANES = ["bench", "lanes", "--env", "CartPole-v1", "--rounds=2", "--seconds=0.1"]


def test_help_names_every_part(tmp_path: Path) -> None:
    code, out, _ = shoal("bench", "--help", cwd=tmp_path)
    assert code == 0
    assert len(out.splitlines()) < 40
    for part in PARTS:
        assert f"shoal bench {part}" in out
    assert set(ALL) <= set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_help(part: str, tmp_path: Path) -> None:
    code, out, _ = shoal("bench", part, "--help", cwd=tmp_path)
    assert code == 0
    assert "--quick" in out


def test_lanes_are_measured_and_written(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/benchmarks.md"
    page.write_text("# Mine\n")
    code, out, err = shoal(*LANES, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "Written to docs/benchmarks.md" in out
    text = page.read_text()
    number = r"[\d,]+ \(.*?\) +"
    rows = re.findall(rf"\| CartPole-v1 \| ([12]) +\| (.*?) +\| {number}\| {number}\| ([\d.]+)x \(", text)
    kinds = ["single environments", "--vector gymnasium", "--vector envpool"]
    assert [row[:2] for row in rows] == [(workers, kind) for workers in "12" for kind in kinds]
    assert all(0.01 < float(ratio) < 9 for *_, ratio in rows)
    assert "Written by `shoal bench lanes --env CartPole-v1 --rounds=2 --seconds=0.1`" in text
    assert re.search(r"\d{4}-\d\d-\d\d; .+, \d+ cores, \d+ GiB", text)


def test_quick_is_said_and_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/benchmarks.md"
    page.write_text("# Mine\n")
    code, out, _ = shoal(*LANES, "--quick", cwd=tmp_path)
    assert code == 0
    assert "QUICK, so figures are rough" in out
    assert "Median of 2 interleaved rounds of 0.1 s" in out, "flags override the defaults of --quick"
    assert page.read_text() == "# Mine\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lane"], "there is no bench 'lane'.*Did you mean lanes?"),
        (["lanes", "--rounds=0", "--seconds=-1", "--env", "Nope-v0"], "rounds must be.*seconds must be.*Nope-v0"),
        (["time", "--env", "Pendulum-v1"], "no score for Pendulum-v1, only for CartPole-v1, LunarLander-v3"),
        (["learn", "--algo", "tpro", "--env", "Nope-v0"], "no algorithm 'tpro'.*no preset 'Nope-v0'"),
        (["learn", "--algo", "ppo", "--svg", "c.svg"], r"svg draws one preset, not \d+"),
        (["learn", "--seeds", "0"], "seeds"),
        (["lanes", "--seed", "0"], "(?i)unrecognized"),
        (["--rounds", "3"], "(?i)unrecognized"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path) -> None:
    code, out, err = shoal("bench", *words, cwd=tmp_path)
    assert code == 2, out
    assert re.search(message, err + out, re.DOTALL), err + out
    assert "Traceback" not in err


def test_signal_ends_everything(tmp_path: Path) -> None:
    words = ["bench", "learn", "--algo=trpo", "--env=CartPole-v1", "--results=r.json", "--steps=100000000"]
    process = start(*words, cwd=tmp_path)
    deadline = time.monotonic() + 90
    while len(children := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "Traceback" not in err
    assert not psutil.wait_procs(children, timeout=15)[1]
