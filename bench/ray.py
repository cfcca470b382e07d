"""TRPO on Ray compared with `processes`; and ten iterations on Pong from RAM, on one worker and on all cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from bench import machine, rounds
from bench.options import BenchOptions, Say
from bench.report import Report, counted, seconds, times
from bench.rounds import Round, SideFailed, Spread
from bench.watch import TrainingProgram, rate, shoal_program
from shoal.base.host import available_cores
from shoal.reports.tables import markdown_table

FOREVER = 10**9
PONG = "Pong-ram"
SERIAL = "serial"


@dataclass(frozen=True)
class RayOptions(BenchOptions):
    """TRPO on Ray compared with `processes`, in steps per second; and ten iterations on Pong from RAM, in seconds."""

    env: tuple[str, ...] = ("LunarLander-v3", "HalfCheetah-v5")
    """Environments on which to measure steps per second."""
    rounds: int = 5
    """Number of rounds; every side takes one turn in each."""
    seconds: float = 10.0
    """Minimum length of a turn in seconds, after the first iterations."""
    pong_iterations: int = 10
    """Number of iterations on Pong from RAM."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ("LunarLander-v3",), "rounds": 1, "seconds": 2.0, "pong_iterations": 2}

    def environments(self) -> list[str]:
        return list(self.env)


OPTIONS = RayOptions


def run(options: RayOptions, say: Say) -> Report:
    """Measure and report."""
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
        benchmark = f"{options.pong_iterations} iterations on {PONG}, seconds"
        rows.append(
            _row(benchmark, side, seconds, found, f"{times(speedup)} on {cores} cores" if side != SERIAL else "")
        )
    notes = (
        f"Batches of 10,000 steps in 4 lanes of 8, one worker per core. Median of {options.rounds} interleaved rounds "
        f"of {options.seconds:g} s (lowest to highest); ratios are taken within a round. Pong: TRPO's preset, whole "
        f"iterations by the run's own clock, without starting workers. {machine.facts({})}"
    )
    return Report("ray", markdown_table(["benchmark", "engine", "result", "speed-up of ray"], rows), notes)


def _row(
    benchmark: str, side: str, formatted: Callable[[Spread | None], str], found: list[Round], ratio: str
) -> list[str]:
    failed = rounds.failure(found, side)
    figure = str(failed) if failed is not None else formatted(rounds.spread(rounds.numbers(found, side)))
    return [benchmark, side, figure, ratio]


def _rate(program: TrainingProgram, seconds: float, _: int) -> float:
    return rate(program, seconds)


def _seconds(program: TrainingProgram, _: int) -> float:
    """Time the iterations after the first, which starts workers and compiles, and scale to all of them."""
    with program.running() as lines:
        found = list(lines)
    if len(found) < 2:
        raise SideFailed("the run ended before its second iteration")
    return (found[-1].seconds - found[0].seconds) * len(found) / (len(found) - 1)


def _program(env: str, engine: str, workers: int, iterations: int) -> TrainingProgram:
    words = [f"--engine={engine}", f"--workers={workers}"]
    if env == PONG:
        return shoal_program("trpo", env, [*words, f"--iterations={iterations}"])
    return shoal_program(
        "trpo", env, [*words, "--no-preset", "--batch-steps=10000", "--lanes=4", "--width=8", f"--steps={iterations}"]
    )
