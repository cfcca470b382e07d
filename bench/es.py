"""Evolution strategies: evaluation compared with the bare environment and peers, and the head's cost per generation.

Shoal runs whole generations, as in training, with a learning rate so small that the policy does not change. Its times
include the head's part, the messages and the wait for the last episode of a generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

import shoal
from bench import machine, rounds
from bench.bare import recorded, replayed_rate
from bench.contest import Entry, contest, contest_table
from bench.options import PeerOptions, Say
from bench.peers import Peers
from bench.report import Report, counted, times
from bench.watch import TrainingProgram, shoal_program
from shoal.algos import es
from shoal.algos.base import Step
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.reports.tables import markdown_table
from shoal.sampling import noise_table
from shoal.sampling.tasks import describe

FOREVER = 10**9
POLICIES: dict[str, tuple[int, ...]] = {"LunarLanderContinuous-v3": (2,), "HalfCheetah-v5": (64, 64)}
"""Hidden layers; linear for other environments."""
EPISODES = 8
"""Episodes per evaluation on CartPole-v1; one in other environments."""
STILL = 1e-12
"""A learning rate at which nothing is learned."""
POPULATIONS = (64, 16)
RECORDED, RECORDED_STEPS = 16, 5_000
"""Policies whose episodes the bare environment repeats, and the minimum number of steps."""
WEIGHTS = (1_000, 100_000, 1_000_000)
EVALUATIONS = 1000


@dataclass(frozen=True)
class ESOptions(PeerOptions):
    """Evolution strategies compared with the bare environment, EvoTorch and Ray tasks; and the head's cost."""

    env: tuple[str, ...] = ("CartPole-v1", "LunarLanderContinuous-v3", "HalfCheetah-v5")
    """Environments to measure."""
    rounds: int = 7
    """Number of rounds; every side takes one turn in each."""
    seconds: float = 4.0
    """Minimum length of a turn in seconds."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ("CartPole-v1",), "rounds": 1, "seconds": 1.0}

    def environments(self) -> list[str]:
        return list(self.env)


OPTIONS = ESOptions


def run(options: ESOptions, say: Say) -> Report:
    """Measure and report."""
    peers = Peers(options.peers_folder, say)
    rows = [row for env in options.env for workers in (1, 2) for row in _compared_with_bare(env, workers, options, say)]
    header = ["environment", "policy", "population", "processes", "bare steps/s", "es steps/s", "es relative to bare"]
    bare = markdown_table(header, rows)
    outcomes = [
        contest(env, _entries(env, peers), peers, options.rounds, options.seconds, options.quick, say)
        for env in options.env
    ]
    cost = _head_cost(options, say)
    notes = (
        f"First table: whole generations without score episodes; bare is one environment per process that repeats the "
        f"recorded episodes of {RECORDED} such policies. Second table: {POPULATIONS[0]} evaluations per generation "
        f"with the same policies; bare takes random actions. An evaluation is one episode, or {EPISODES} on "
        f"CartPole-v1, where a new policy falls after some 20 steps. EvoTorch runs PGPE. Ray tasks are a plain NumPy "
        f"strategy whose evaluations are split into the given number of tasks. Third table: the head's cost for "
        f"{EVALUATIONS:,} evaluations ({EVALUATIONS // 2} directions), which is the weighted sum of directions, and "
        f"Adam. Median of {options.rounds} interleaved rounds of {options.seconds:g} s (lowest to highest); ratios are "
        f"taken within a round. {machine.facts(peers.versions())}"
    )
    return Report("es", "\n\n".join([bare, contest_table(outcomes), cost]), notes)


def _hidden(env: str) -> tuple[int, ...]:
    return POLICIES.get(env, ())


def _episodes(env: str) -> int:
    return EPISODES if env == "CartPole-v1" else 1


def _words(hidden: tuple[int, ...]) -> str:
    return "x".join(map(str, hidden)) or "linear"


# Compared with the bare environment --------------------------------------------------------------------------------


def _compared_with_bare(env: str, workers: int, options: ESOptions, say: Say) -> list[list[str]]:
    say(f"{env} on {workers} process(es): steps per second")
    with shoal.engine("processes", workers=workers) as engine:
        engine.map(describe, [EnvSpec(env).to_record()] * workers)
        searches = {f"population {count}": Generations(engine, env, count) for count in POPULATIONS}
        episodes = next(iter(searches.values())).recorded()
        sides = {"bare": lambda _: replayed_rate(engine, env, options.seconds, episodes)} | {
            name: (lambda _, search=search: search.run(options.seconds)) for name, search in searches.items()
        }
        found = rounds.measure(sides, options.rounds, say)
    bare = counted(rounds.spread(rounds.numbers(found, "bare")))
    return [
        [
            env, _words(_hidden(env)), str(count), str(workers), bare,
            counted(rounds.spread(rounds.numbers(found, name))),
            times(rounds.spread(rounds.ratios(found, name, "bare"))),
        ]
        for count, name in zip(POPULATIONS, searches, strict=True)
    ]  # fmt: skip


class Generations:
    """One side of the comparison: generations of a search whose policy does not change."""

    def __init__(self, engine: Engine, env: str, population: int) -> None:
        config = es.Config(
            population=population, episodes=_episodes(env), hidden=_hidden(env), lr=STILL, score_episodes=0
        )
        self._env, self._sigma = env, config.sigma
        self._steps: Iterator[Step] = es.train(config, EnvSpec(env), engine, 0, FOREVER)
        first = next(self._steps)
        self._saved, self._taken = first.policy, first.metrics["time/total_timesteps"]

    def recorded(self) -> list[Tree]:
        """Record episodes of policies like those that the search evaluates."""
        rng, weights = np.random.default_rng(0), self._saved.weights
        away = rng.normal(0, self._sigma, (RECORDED, len(weights["params"]))).astype(np.float32)
        tried = [weights | {"params": weights["params"] + step} for step in away]
        return recorded(self._env, self._saved.policy, tried, RECORDED_STEPS)

    def run(self, seconds: float) -> float:
        before, begun = self._taken, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            self._taken = next(self._steps).metrics["time/total_timesteps"]
        return (self._taken - before) / (time.perf_counter() - begun)


# Compared with peers -----------------------------------------------------------------------------------------------


def _entries(env: str, peers: Peers) -> list[Entry]:
    """List the libraries, each with its best known setting first."""
    job = {
        "env": env, "hidden": list(_hidden(env)), "population": POPULATIONS[0], "episodes": _episodes(env), "seed": 0,
    }  # fmt: skip
    evotorch = {f"{actors} actors": peers.program("evotorch_es", job | {"actors": actors}, 1) for actors in (2, 0)}
    tasks = {f"{count} tasks": peers.program("ray_es", job | {"tasks": count}, 1) for count in (2, 16)}
    return [
        Entry("Shoal", {"2 workers": _shoal(env)}, peer=False),
        Entry("EvoTorch", evotorch),
        Entry("Ray tasks", tasks),
    ]


def _shoal(env: str) -> TrainingProgram:
    hidden = _hidden(env)
    words = [
        "--no-preset", "--workers=2", f"--population={POPULATIONS[0]}", f"--lr={STILL}", f"--steps={FOREVER}",
        "--score-episodes=0", f"--episodes={_episodes(env)}", *(["--hidden", *map(str, hidden)] if hidden else []),
    ]  # fmt: skip
    return shoal_program("es", env, words)


# The head ------------------------------------------------------------------------------------------------------------


def _head_cost(options: ESOptions, say: Say) -> str:
    """Time the head's work for a generation, and reading and summing the same number of bytes."""
    say("the head's cost of a generation: milliseconds")
    directions = noise_table.open_table(0, es.Config.table_size)
    rows = []
    for count in WEIGHTS:
        rng = np.random.default_rng(0)
        places = rng.integers(0, len(directions) - count, EVALUATIONS // 2)
        worth = rng.normal(size=EVALUATIONS // 2)
        kept = {slot: np.zeros(count, np.float32) for slot in es.SLOTS["adam"]}
        sides = {
            "reading": partial(_milliseconds, _read, directions, places, count),
            "head": partial(_milliseconds, _learn, directions, worth, places, kept),
        }
        found = rounds.measure(sides, max(3, options.rounds), say)
        reading, head = (rounds.spread(rounds.numbers(found, side)) for side in sides)
        gigabytes = EVALUATIONS // 2 * count * 4 / 1e9
        speed = f"{gigabytes / head.middle * 1e3:.1f}" if head else ""
        rows.append(
            [
                f"{count:,}",
                _ms(head),
                speed,
                _ms(reading),
                times(rounds.spread(rounds.ratios(found, "head", "reading"))),
            ]
        )
    return markdown_table(
        ["weights", "head ms", "GB/s", "reading the same bytes, ms", "head relative to reading"], rows
    )


def _milliseconds(function: Callable[..., object], *args: object) -> float:
    begun = time.perf_counter()
    function(*args[:-1])  # without the round's number
    return 1e3 * (time.perf_counter() - begun)


def _read(directions: np.ndarray, places: np.ndarray, count: int) -> float:
    return float(sum(directions[place : place + count].sum() for place in places.tolist()))


def _learn(directions: np.ndarray, worth: np.ndarray, places: np.ndarray, kept: Tree) -> None:
    gradient = noise_table.weighted_sum(directions, worth, places, len(kept["mean"]))
    es.ascend(es.Config(), kept, gradient, 1)


def _ms(found: rounds.Spread | None) -> str:
    return "" if found is None else f"{found.middle:.2f} ({found.low:.2f} to {found.high:.2f})"
