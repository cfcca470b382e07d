"""Sampling compared with the bare environment, in interleaved rounds.

Bare is `env.step` with actions drawn beforehand and a seeded reset after each episode, in one process or in two at
once. Shoal samples as it does in training: weights shared again for each batch, one batched forward pass per step,
results gathered on the head in lane order.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import shoal
from bench import machine, rounds
from bench.bare import bare_rate
from bench.options import BenchOptions, Say
from bench.report import Report, counted, times
from shoal.base import seeding
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import UsageError
from shoal.policies import actions
from shoal.policies.policy import Policy
from shoal.reports.tables import markdown_table
from shoal.sampling.lanes import Lanes
from shoal.sampling.tasks import describe

ENVS = ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5")


@dataclass(frozen=True)
class LanesOptions(BenchOptions):
    """Sampling compared with the bare environment, on one process and on two; also native vector environments."""

    env: tuple[str, ...] = ENVS
    """Environments to measure."""
    rounds: int = 15
    """Number of rounds; both sides take one turn in each."""
    seconds: float = 1.0
    """Length of a turn in seconds."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ENVS[:2], "rounds": 3, "seconds": 0.5}

    def environments(self) -> list[str]:
        return list(self.env)


OPTIONS = LanesOptions


def run(options: LanesOptions, say: Say) -> Report:
    """Measure and report."""
    rows = [row for env in options.env for workers in (1, 2) for row in _rows(env, workers, options, say)]
    header = ["environment", "processes", "lanes of", "bare steps/s", "lanes steps/s", "lanes relative to bare"]
    notes = (
        f"Bare is the environment that `gymnasium.make` returns, with its wrappers for time limit and order of calls, "
        f"which lanes do without. Lanes of 32 environments, two per worker, networks of 64x64, fragments "
        f"of 128 steps. Median of {options.rounds} interleaved rounds of {options.seconds:g} s (lowest to highest); "
        f"ratios are taken within a round. {machine.facts({})}"
    )
    return Report("lanes", markdown_table(header, rows), notes)


def _rows(env: str, workers: int, options: LanesOptions, say: Say) -> list[list[str]]:
    say(f"{env} on {workers} process(es): steps per second")
    with shoal.engine("processes", workers=workers) as engine:
        samplers = {
            name: Sampler(engine, spec, lanes=2 * workers, width=32, steps=128) for name, spec in _kinds(env).items()
        }
        sides = {"bare": lambda _: bare_rate(engine, env, options.seconds)} | {
            name: (lambda _, sampler=sampler: sampler.run(options.seconds)) for name, sampler in samplers.items()
        }
        found = rounds.measure(sides, options.rounds, say)
    bare = counted(rounds.spread(rounds.numbers(found, "bare")))
    return [
        [
            env, str(workers), name, bare, counted(rounds.spread(rounds.numbers(found, name))),
            times(rounds.spread(rounds.ratios(found, name, "bare"))),
        ]
        for name in samplers
    ]  # fmt: skip


def _kinds(env: str) -> dict[str, EnvSpec]:
    """List the environment and those of its native vector versions that are installed."""
    kinds = {"single environments": EnvSpec(env)}
    for vector in ("gymnasium", "envpool"):
        spec = EnvSpec(env, vector=vector)
        with contextlib.suppress(UsageError):
            describe(spec.to_record())
            kinds[f"--vector {vector}"] = spec
    return kinds


class Sampler:
    """One side of the comparison: lanes with a fresh policy, as an algorithm would drive them."""

    def __init__(self, engine: Engine, spec: EnvSpec, lanes: int, width: int, steps: int) -> None:
        spaces = engine.submit(describe, spec.to_record()).result()
        distribution = actions.from_record(spaces["distribution"])
        policy = Policy(tuple(spaces["shape"]), spaces["dtype"], distribution, (64, 64), normalise=True)
        self.engine, self.steps = engine, steps
        self.lanes = Lanes(engine, spec, policy, seed=0, count=lanes, width=width)
        self.weights = {
            "params": policy.init(seeding.rng(0, "weights")),
            "mean": np.zeros(policy.inputs, np.float32),
            "scale": np.ones(policy.inputs, np.float32),
        }
        self.iterate()

    def iterate(self) -> int:
        """Sample one batch and return its steps, without those that vector environments spend on resets."""
        records = self.lanes.fragments(self.engine.share(self.weights), self.steps)
        return sum(int(record["steps"].sum()) - len(record["skipped"]) for record in records)

    def run(self, seconds: float) -> float:
        steps, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            steps += self.iterate()
        return steps / (time.perf_counter() - begun)
