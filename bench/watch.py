"""A library with one setting, as a process that trains and says how far it is; and what is measured of it.

Every iteration is one line of JSON in a file: Shoal's metrics.jsonl, or what a peer's script prints. The lines carry
the process's own clock, so that start-up and compilation can be left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rounds import SideFailed
from shoal.base.host import python_path, shoal_command

WARM = 2
"""Iterations that are not measured: the first ones start workers and compile."""
PATIENCE = 180.0
"""Seconds without a new line after which a process is given up."""
_LOOK_EVERY = 0.01
_GOODBYE = 15.0  # seconds to end in after SIGTERM


@dataclass(frozen=True)
class Line:
    """Where training stands after one iteration."""

    steps: int
    """Environment steps so far."""
    seconds: float
    """By the process's own clock; only differences mean something."""
    score: float | None
    """Mean return of the last 100 training episodes, once there is one."""
    updates: int
    """Gradient steps so far, where the library says."""
    wall: float
    """Seconds since the process was started, as seen from here."""


@dataclass(frozen=True)
class TrainingProgram:
    """How to start a library, and which numbers of its lines are which."""

    command: Sequence[str]
    environment: Mapping[str, str]
    file: str = "stdout"
    """Where the lines are, in the folder it is started in."""
    steps: str = "steps"
    seconds: str = "seconds"
    score: str = "return"
    updates: str = "updates"

    @contextlib.contextmanager
    def running(self, patience: float = PATIENCE, cap: float = math.inf) -> Iterator[Iterator[Line]]:
        """Start it in a folder of its own; give its lines as they come, for `cap` seconds. It ends with the block."""
        with tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
                begun = time.monotonic()
                try:
                    process = subprocess.Popen(
                        self.command, cwd=folder, env={"HOME": name, **self.environment}, stdin=subprocess.DEVNULL,
                        stdout=out, stderr=err, start_new_session=True,
                    )  # fmt: skip
                except OSError as error:
                    raise SideFailed(f"{self.command[0]}: {error.strerror}") from None
            try:
                yield self._lines(process, folder, begun, patience, cap)
            finally:
                stop(process)

    def _lines(
        self, process: subprocess.Popen[bytes], folder: Path, begun: float, patience: float, cap: float
    ) -> Iterator[Line]:
        path, at, heard = folder / self.file, 0, time.monotonic()
        while True:
            ended = process.poll() is not None  # asked before reading, so that its last words are read
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(at)
                content = file.read()
                whole = content[: content.rfind(b"\n") + 1]
                at += len(whole)
                for text in whole.splitlines():
                    heard = time.monotonic()
                    record = _record(text, self.steps)
                    if record is not None:
                        score, updates = record.get(self.score), record.get(self.updates, 0)
                        yield Line(record[self.steps], record[self.seconds], score, updates, heard - begun)
            if ended:
                if process.returncode:
                    raise SideFailed(last_words(folder, process.returncode))
                return
            if time.monotonic() - begun > cap:
                return
            if time.monotonic() - heard > patience:
                raise SideFailed(f"nothing new in {patience:.0f} s; {last_words(folder, None)}")
            time.sleep(_LOOK_EVERY)


def _record(text: bytes, key: str) -> dict[str, Any] | None:
    """A line as data; None for what libraries print besides."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and key in record else None


def last_words(folder: Path, code: int | None) -> str:
    """The last line that a process wrote to stderr, or to stdout; its exit code if it wrote none."""
    for name in ("stderr", "stdout"):
        lines = (folder / name).read_text(errors="replace").split("\n")
        found = [line.strip() for line in lines if line.strip() and not line.startswith("{")]
        if found:
            return found[-1][:200]
    return "it said nothing" if code is None else f"exit code {code}, and it said nothing"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, politely first, and then everything that it left behind."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GOODBYE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def shoal_environment() -> dict[str, str]:
    """Environment variables with which a child process imports this very Shoal."""
    return {**os.environ, "PYTHONPATH": python_path()}


def shoal_program(algo: str, env: str, words: Sequence[str]) -> TrainingProgram:
    """Shoal by its ordinary command line."""
    return TrainingProgram(
        shoal_command("train", algo, env, *words, "--runs=runs", "--name=bench"),
        shoal_environment(),
        file="runs/bench/metrics.jsonl",
        steps="time/total_timesteps",
        seconds="time/time_elapsed",
        score="rollout/ep_rew_mean",
        updates="train/n_updates",
    )


def rate(program: TrainingProgram, seconds: float, warm: int = WARM, patience: float = PATIENCE) -> float:
    """Environment steps per second of whole iterations, over at least `seconds` after the first `warm` ones."""
    first, last = stretch(program, seconds, lambda number, _: number >= warm, patience)
    return (last.steps - first.steps) / (last.seconds - first.seconds)


def stretch(
    program: TrainingProgram, seconds: float, warm: Callable[[int, Line], bool], patience: float = PATIENCE
) -> tuple[Line, Line]:
    """The first line of a run that is `warm`, and one that is at least `seconds` later."""
    with program.running(patience) as lines:
        first: Line | None = None
        for number, line in enumerate(lines, start=1):
            if first is not None and line.seconds - first.seconds >= seconds:
                return first, line
            if first is None and warm(number, line):
                first = line
    raise SideFailed(f"it ended before it was warm and {seconds:g} s were over")


@dataclass(frozen=True)
class Reached:
    """When a score was reached."""

    seconds: float
    """Since the process was started, imports and compilation included."""
    steps: int


def reach(program: TrainingProgram, score: float, cap: float) -> Reached:
    """Train until the mean return of 100 episodes is `score`, for at most `cap` seconds."""
    begun, best, steps = time.monotonic(), -math.inf, 0
    with program.running(patience=cap, cap=cap) as lines:
        for line in lines:
            steps = line.steps
            if line.score is not None:
                best = max(best, line.score)
                if line.score >= score and line.wall <= cap:
                    return Reached(line.wall, line.steps)
        over = time.monotonic() - begun >= cap
    raise SideFailed(f"not within {f'{cap:.0f} s and ' if over else ''}{steps:,} steps: {best:.0f} at best")
