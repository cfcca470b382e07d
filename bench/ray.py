"""TRPO on Ray beside TRPO on `processes`; and ten iterations on Pong from RAM, on one worker and on all cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from bench import machine, rounds
from bench.options import BenchOptions, Say
from bench.report import Report, counted, seconds, times
from bench.rounds import Round, SideFailed
from bench.watch import TrainingProgram, rate, shoal_program
from shoal.base.host import available_cores
from shoal.reports.tables import markdown_table

FOREVER = 10**9
PONG = "Pong-ram"
SERIAL = "serial"


@dataclass(frozen=True)
class RayOptions(BenchOptions):
    """TRPO on Ray beside `processes`, in steps per second; and ten iterations of Pong from RAM, in seconds."""

    env: tuple[str, ...] = ("LunarLander-v3", "HalfCheetah-v5")
    """Environments for the steps per second."""
    rounds: int = 5
    """In each, every side takes its turn."""
    seconds: float = 10.0
    """How long a turn is measured, at least, once training goes on steadily."""
    pong_iterations: int = 10
    """Iterations on Pong from RAM."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ("LunarLander-v3",), "rounds": 1, "seconds": 2.0, "pong_iterations": 2}

    def environments(self) -> list[str]:
        return list(self.env)


OPTIONS = RayOptions


def run(options: RayOptions, say: Say) -> Report:
    """Measure, and report."""
    cores = available_cores()
    rows = []
    for env in options.env:
        say(f"{env}: steps per second")
        sides = {
            engine: partial(_rate, _program(env, engine, cores, FOREVER), options.seconds)
            for engine in ("processes", "ray")
        }
        found = rounds.measure(sides, options.rounds, say)
        ratio = rounds.spread(rounds.ratios(found, "ray", "processes"))
        rows += [_row(env, side, counted, found, times(ratio) if side == "ray" else "") for side in sides]
    say(f"{PONG}: seconds for {options.pong_iterations} iterations")
    pong = {
        SERIAL: partial(_seconds, _program(PONG, SERIAL, 1, options.pong_iterations)),
        f"ray, {cores} workers": partial(_seconds, _program(PONG, "ray", cores, options.pong_iterations)),
    }
    found = rounds.measure(pong, options.rounds, say)
    for side in pong:
        speedup = rounds.spread(rounds.ratios(found, SERIAL, side))
        what = f"{options.pong_iterations} iterations on {PONG}, seconds"
        rows.append(_row(what, side, seconds, found, f"{times(speedup)} on {cores} cores" if side != SERIAL else ""))
    notes = (
        f"Batches of 10,000 steps in 4 lanes of 8, one worker per core. Median of {options.rounds} interleaved rounds "
        f"of {options.seconds:g} s (lowest to highest); ratios are taken within a round. Pong: TRPO's preset, whole "
        f"iterations by the run's own clock, without the start of workers. {machine.facts({})}"
    )
    return Report("ray", markdown_table(["what", "engine", "figure", "ray is"], rows), notes)


def _row(what: str, side: str, words: Callable[..., str], found: list[Round], ratio: str) -> list[str]:
    failed = rounds.failure(found, side)
    figure = str(failed) if failed is not None else words(rounds.spread(rounds.numbers(found, side)))
    return [what, side, figure, ratio]


def _rate(program: TrainingProgram, seconds: float, _: int) -> float:
    return rate(program, seconds)


def _seconds(program: TrainingProgram, _: int) -> float:
    """Seconds from the end of the first iteration, which starts workers and compiles, to that of the last."""
    with program.running() as lines:
        found = list(lines)
    if len(found) < 2:
        raise SideFailed("it ended before its second iteration")
    return (found[-1].seconds - found[0].seconds) * len(found) / (len(found) - 1)


def _program(env: str, engine: str, workers: int, iterations: int) -> TrainingProgram:
    words = [f"--engine={engine}", f"--workers={workers}"]
    if env == PONG:
        return shoal_program("trpo", env, [*words, f"--iterations={iterations}"])
    return shoal_program(
        "trpo", env, [*words, "--no-preset", "--batch-steps=10000", "--lanes=4", "--width=8", f"--steps={iterations}"]
    )
