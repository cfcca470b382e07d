"""The redis engine compared with processes: bytes on the wire, time per task, steps per second, hundreds of workers.

Server and workers run on this machine, so the times include no network latency. The server itself counts the bytes.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import shoal
from bench import machine, rounds
from bench.lanes import Sampler
from bench.options import BenchOptions, Say
from bench.report import Report, counted, times
from bench.sleepers import sleep
from bench.task_cost import microseconds
from bench.watch import shoal_environment
from shoal.algos import es
from shoal.base import validation
from shoal.base.host import module_command
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.reports.tables import markdown_table
from shoal.sampling.tasks import describe
from shoal.testing.redis_rig import RedisRig

ENVS = ("LunarLander-v3", "HalfCheetah-v5")
STRATEGY = es.Config(population=64, hidden=(480, 480), table_size=1 << 20)
"""A search that sends mostly weights: about a megabyte on CartPole-v1."""


@dataclass(frozen=True)
class RedisOptions(BenchOptions):
    """The redis engine compared with processes: steps, time per task, bytes, and hundreds of workers."""

    env: tuple[str, ...] = ENVS
    """Environments to measure."""
    rounds: int = 9
    """Number of rounds; both sides take one turn in each."""
    seconds: float = 1.0
    """Length of a turn in seconds."""
    sleepers: int = 500
    """Number of simulated workers that sleep for a second per task."""
    naps: int = 20
    """Tasks per simulated worker."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ENVS[:1], "rounds": 3, "seconds": 0.5, "naps": 5}

    def environments(self) -> list[str]:
        return list(self.env)

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        few = ["naps must be at least 3: the first and the last are not measured"] if self.naps < 3 else []
        return super().problems() + validation.field_problems(self, at_least_one=("sleepers",)) + few


OPTIONS = RedisOptions


def run(options: RedisOptions, say: Say) -> Report:
    """Measure and report."""
    rows = [_speed(env, options, say) for env in options.env]
    rows += _tasks(options, say)
    rows += [_bytes(machines, env, say) for env in ("", *options.env[:1]) for machines in (1, 2)]
    rows.append(_sleepers(options, say))
    notes = (
        f"Steps per second: two workers, four lanes of 32 environments, networks of 64x64, fragments of 128 steps. "
        f"Median of {options.rounds} interleaved rounds of {options.seconds:g} s (lowest to highest). Bytes: as the "
        f"server counts them, for two workers; one iteration is one such batch of lanes, or for es a generation of "
        f"{STRATEGY.population} policies of {'x'.join(map(str, STRATEGY.hidden))} on CartPole-v1. Utilisation: seconds "
        f"slept divided by workers times elapsed seconds. {machine.facts({})}"
    )
    return Report(
        "redis", markdown_table(["benchmark", "processes", "redis", "redis relative to processes"], rows), notes
    )


@contextlib.contextmanager
def _both(workers: int) -> Iterator[dict[str, Engine]]:
    with RedisRig(allow=["bench"]) as rig, contextlib.ExitStack() as stack:
        rig.add_machine(workers)
        rig.wait_for_workers(workers)
        yield {
            "processes": stack.enter_context(shoal.engine("processes", workers=workers)),
            "redis": stack.enter_context(shoal.engine(rig.address, workers=workers)),
        }


def _speed(env: str, options: RedisOptions, say: Say) -> list[str]:
    say(f"{env}: steps per second with 2 workers")
    with _both(2) as engines:
        samplers = {}
        for name, engine in engines.items():
            engine.map(describe, [EnvSpec(env).to_record()] * 2)
            samplers[name] = Sampler(engine, EnvSpec(env), lanes=4, width=32, steps=128)
        sides = {name: (lambda _, s=sampler: s.run(options.seconds)) for name, sampler in samplers.items()}
        found = rounds.measure(sides, options.rounds, say)
    columns = [counted(rounds.spread(rounds.numbers(found, side))) for side in sides]
    return [f"{env}, steps/s", *columns, times(rounds.spread(rounds.ratios(found, "redis", "processes")))]


def _tasks(options: RedisOptions, say: Say) -> list[list[str]]:
    """Measure the microseconds per task, with many tasks at once and with one at a time."""
    say("time per task with 1 worker, in microseconds")

    def many(engine: Engine) -> float:
        return microseconds(engine, options.seconds)

    def alone(engine: Engine) -> float:
        return microseconds(engine, options.seconds, at_once=1)

    rows = []
    with _both(1) as engines:
        for what, measure in (("µs per task, many at once", many), ("µs per task, one after the other", alone)):
            sides = {name: (lambda _, e=engine, m=measure: m(e)) for name, engine in engines.items()}
            found = rounds.measure(sides, options.rounds, say)
            columns = [counted(rounds.spread(rounds.numbers(found, side))) for side in sides]
            rows.append([what, *columns, times(rounds.spread(rounds.ratios(found, "redis", "processes")))])
    return rows


def _bytes(machines: int, env: str, say: Say) -> list[str]:
    """Count the bytes per iteration through the server: of lanes, or without `env` of generations of `STRATEGY`."""
    iterations = 10
    with RedisRig(allow=["bench"]) as rig:
        for _ in range(machines):
            rig.add_machine(2 // machines)
        rig.wait_for_workers(2)
        with shoal.engine(rig.address, workers=2) as engine:
            if env:
                iterate: Callable[[], object] = Sampler(engine, EnvSpec(env), lanes=4, width=32, steps=128).iterate
            else:
                iterate = partial(next, es.train(STRATEGY, EnvSpec("CartPole-v1"), engine, seed=0, steps=1))
            iterate()
            before = _traffic(rig)
            for _ in range(iterations):
                iterate()
            into, out = ((now - then) / iterations for now, then in zip(_traffic(rig), before, strict=True))
    what = f"bytes per iteration, {env or 'es'}, {machines} machine(s)"
    say(f"{what}: {into:,.0f} into the server, {out:,.0f} out of it")
    return [what, "", f"{into:,.0f} in, {out:,.0f} out", ""]


def _traffic(rig: RedisRig) -> tuple[int, int]:
    with rig.connection() as link:
        found: Any = link.info("stats")
    return found["total_net_input_bytes"], found["total_net_output_bytes"]


def _sleepers(options: RedisOptions, say: Say) -> list[str]:
    what = f"utilisation of {options.sleepers} workers with tasks of 1 s"
    say(f"{what}, {options.naps} each")
    share = utilisation(options.sleepers, options.naps, 1.0)
    say(f"  {share:.3f}")
    return [what, "", f"{share:.3f}", ""]


def utilisation(count: int, naps: int, seconds: float) -> float:
    """Share of the time that simulated workers spend in tasks, without the first and the last task of each."""
    with RedisRig() as rig:
        command = module_command("bench.sleepers", rig.address, str(count))
        sleepers = subprocess.Popen(command, env=shoal_environment())
        try:
            with shoal.engine(rig.address, workers=count) as engine:
                futures = [engine.submit(sleep, seconds) for _ in range(count * naps)]
                marks = []
                for done in (count, count * (naps - 1)):
                    while engine.telemetry().tasks < done:
                        time.sleep(0.005)
                    marks.append((time.perf_counter(), engine.telemetry().busy_seconds))
                for future in futures:
                    future.result()
        finally:
            sleepers.kill()
            sleepers.wait()
    (begun, before), (ended, after) = marks
    return (after - before) / ((ended - begun) * count)
