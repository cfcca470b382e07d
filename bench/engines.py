"""Engines compared with `processes`: overhead per task, and the training speed of the same run.

The second table has one environment and a growing number of workers, beyond the number of cores, to show what too many
workers cost.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from bench import machine, rounds
from bench.options import BenchOptions, Say
from bench.report import Report, counted, times
from bench.rounds import Round, SideFailed
from bench.watch import TrainingProgram, rate, shoal_environment, shoal_program
from shoal.base.host import module_command
from shoal.reports.tables import markdown_table
from shoal.spmd.launching import mpirun

PLAIN = "processes"
ENGINES = (PLAIN, "mpi")
WORKERS = 2
GROWING = (1, 2, 4, 8)


@dataclass(frozen=True)
class EnginesOptions(BenchOptions):
    """Overhead of each engine per task, and training on it compared with processes."""

    env: tuple[str, ...] = ("LunarLander-v3", "HalfCheetah-v5")
    """Environments to train on with every engine."""
    growing: str = "Walker2d-v5"
    """Environment to train on with a growing number of workers."""
    rounds: int = 3
    """Number of rounds; every engine takes one turn in each."""
    seconds: float = 3.0
    """Minimum length of a turn in seconds, after the first iterations."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ("LunarLander-v3",), "rounds": 1, "seconds": 1.0}

    def environments(self) -> list[str]:
        return [*self.env, self.growing]


OPTIONS = EnginesOptions


def run(options: EnginesOptions, say: Say) -> Report:
    """Measure and report."""
    say(f"microseconds per task, {WORKERS} workers")
    sides: dict[str, Callable[[int], float]] = {name: partial(_task_cost, name, options.seconds) for name in ENGINES}
    found = rounds.measure(sides, options.rounds, say)
    rows = [_row(found, "a task that does nothing, microseconds", name) for name in ENGINES]
    for env in options.env:
        say(f"{env}: steps per second of TRPO, {WORKERS} workers")
        sides = {name: partial(_rate, _trpo(env, name, WORKERS), options.seconds) for name in ENGINES}
        found = rounds.measure(sides, options.rounds, say)
        rows += [_row(found, f"TRPO on {env}, steps/s", name) for name in ENGINES]
    say(f"{options.growing}: steps per second of TRPO on a growing number of workers")
    serial = "serial"
    sides = {serial: partial(_rate, _trpo(options.growing, serial, 1), options.seconds)}
    for name in ENGINES:
        for workers in GROWING:
            program = _trpo(options.growing, name, workers)
            sides[f"{name}, {workers} workers"] = partial(_rate, program, options.seconds)
    found = rounds.measure(sides, options.rounds, say)
    grown = [[side, *_cells(found, side, serial)] for side in sides]
    tables = [
        markdown_table(["benchmark", "engine", f"on {WORKERS} workers", f"relative to {PLAIN}"], rows),
        markdown_table([f"TRPO on {options.growing}", "steps/s", f"relative to {serial}"], grown),
    ]
    notes = (
        f"TRPO with batches of 10,000 steps in 8 lanes of 8, otherwise with its defaults. Median of {options.rounds} "
        f"interleaved rounds of {options.seconds:g} s (lowest to highest); ratios are taken within a round. "
        f"{machine.facts({})}"
    )
    return Report("engines", "\n\n".join(tables), notes)


def _row(found: Sequence[Round], what: str, name: str) -> list[str]:
    return [what, name, *_cells(found, name, PLAIN)]


def _cells(found: Sequence[Round], side: str, other: str) -> list[str]:
    failed = rounds.failure(found, side)
    if failed is not None:
        return [f"failed: {failed}", ""]
    ratio = times(rounds.spread(rounds.ratios(found, side, other))) if side != other else ""
    return [counted(rounds.spread(rounds.numbers(found, side))), ratio]


def _rate(program: TrainingProgram, seconds: float, _: int) -> float:
    return rate(program, seconds)


def _trpo(env: str, engine: str, workers: int) -> TrainingProgram:
    words = [
        "--no-preset", f"--engine={engine}", f"--workers={workers}", "--lanes=8", "--width=8",
        "--batch-steps=10000", "--steps=1000000000",
    ]  # fmt: skip
    return shoal_program("trpo", env, words)


def _task_cost(engine: str, seconds: float, _: int) -> float:
    command = module_command("bench.task_cost", engine, str(WORKERS), str(seconds))
    if engine == "mpi":
        command = [*mpirun(1 + WORKERS), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=shoal_environment(), check=False)
    if done.returncode:
        raise SideFailed((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return float(json.loads(done.stdout.splitlines()[-1])["microseconds"])
