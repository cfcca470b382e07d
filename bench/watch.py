"""A library that trains in its own process and logs its progress, and measurements of that progress.

Every iteration is one line of JSON in a file: Shoal's metrics.jsonl, or the output of a peer's script. The lines carry
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
"""First iterations, which start workers and compile, and are not measured."""
PATIENCE = 180.0
"""Seconds without a new line after which a process counts as failed."""
_LOOK_EVERY = 0.01
_GRACE = 15.0  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Line:
    """Progress after one iteration."""

    steps: int
    """Environment steps so far."""
    seconds: float
    """By the process's own clock; only differences are meaningful."""
    score: float | None
    """Mean return of the last 100 training episodes; None before the first has ended."""
    updates: int
    """Gradient steps so far; 0 if the library does not report them."""
    wall: float
    """Seconds since the process was started, by this process's clock."""


@dataclass(frozen=True)
class TrainingProgram:
    """How to start a library, and the keys of its lines."""

    command: Sequence[str]
    environment: Mapping[str, str]
    file: str = "stdout"
    """File with the lines, relative to the folder in which the program is started."""
    steps: str = "steps"
    seconds: str = "seconds"
    score: str = "return"
    updates: str = "updates"

    @contextlib.contextmanager
    def running(self, patience: float = PATIENCE, cap: float = math.inf) -> Iterator[Iterator[Line]]:
        """Start the program in a temporary folder and yield its lines for `cap` seconds; stop it with the block."""
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
            ended = process.poll() is not None  # checked before reading, so that its last lines are read
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
                    raise SideFailed(last_output(folder, process.returncode))
                return
            if time.monotonic() - begun > cap:
                return
            if time.monotonic() - heard > patience:
                raise SideFailed(f"no progress in {patience:.0f} s; last output: {last_output(folder, None)}")
            time.sleep(_LOOK_EVERY)


def _record(text: bytes, key: str) -> dict[str, Any] | None:
    """Parse a line; None if it is other output of the library."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and key in record else None


def last_output(folder: Path, code: int | None) -> str:
    """Return the last line that a process wrote to stderr, or else to stdout, or else its exit code."""
    for name in ("stderr", "stdout"):
        lines = (folder / name).read_text(errors="replace").split("\n")
        found = [line.strip() for line in lines if line.strip() and not line.startswith("{")]
        if found:
            return found[-1][:200]
    return "none" if code is None else f"exit code {code} without any output"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, with SIGTERM first, and kill everything that it leaves behind."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def shoal_environment() -> dict[str, str]:
    """Return environment variables with which a child process imports the same copy of Shoal."""
    return {**os.environ, "PYTHONPATH": python_path()}


def shoal_program(algo: str, env: str, words: Sequence[str]) -> TrainingProgram:
    """Train with Shoal from the command line."""
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
    """Measure steps per second over whole iterations, for at least `seconds` after the first `warm` iterations."""
    first, last = stretch(program, seconds, lambda number, _: number >= warm, patience)
    return (last.steps - first.steps) / (last.seconds - first.seconds)


def stretch(
    program: TrainingProgram, seconds: float, warm: Callable[[int, Line], bool], patience: float = PATIENCE
) -> tuple[Line, Line]:
    """Return the first line for which `warm` is true, and the next that is at least `seconds` later."""
    with program.running(patience) as lines:
        first: Line | None = None
        for number, line in enumerate(lines, start=1):
            if first is not None and line.seconds - first.seconds >= seconds:
                return first, line
            if first is None and warm(number, line):
                first = line
    raise SideFailed(f"the process ended before {seconds:g} s of steady training")


@dataclass(frozen=True)
class Reached:
    """Time and steps at which a score was reached."""

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
