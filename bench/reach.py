"""Time to a score, each library with its best known settings: wall time from the start of the process, and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypedDict

from bench import machine, rounds
from bench.contest import scout
from bench.options import PeerOptions, Say
from bench.peers import EnvLayout, Peers
from bench.report import Report, counted, seconds, times
from bench.rounds import spread
from bench.watch import TrainingProgram, rate, reach, shoal_program
from shoal.reports.tables import markdown_table
from shoal.runs import presets

SCORES = {"CartPole-v1": 475.0, "LunarLander-v3": 200.0}
"""The mean return of 100 consecutive training episodes that counts as solved."""

SCOUTING = 3.0
"""Seconds to try a setting for."""


class ZooSettings(TypedDict):
    """Settings of rl-baselines3-zoo for one environment."""

    envs: int
    steps: int
    settings: dict[str, object]


ZOO: Mapping[tuple[str, str], ZooSettings] = {
    ("PPO", "CartPole-v1"): {
        "envs": 8, "steps": 100_000,
        "settings": {
            "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "ent_coef": 0.0,
            "learning_rate": "lin_0.001", "clip_range": "lin_0.2",
        },
    },
    ("PPO", "LunarLander-v3"): {
        "envs": 16, "steps": 1_000_000,
        "settings": {
            "n_steps": 1024, "batch_size": 64, "n_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98, "ent_coef": 0.01,
        },
    },
    ("TRPO", "CartPole-v1"): {
        "envs": 2, "steps": 100_000,
        "settings": {
            "n_steps": 512, "batch_size": 512, "cg_damping": 1e-3, "gae_lambda": 0.98, "gamma": 0.99,
            "learning_rate": 1e-3, "n_critic_updates": 20,
        },
    },
    ("TRPO", "LunarLander-v3"): {
        "envs": 2, "steps": 200_000,
        "settings": {
            "n_steps": 512, "cg_damping": 0.01, "gae_lambda": 0.98, "gamma": 0.99, "learning_rate": 1e-3,
            "n_critic_updates": 15,
        },
    },
}  # fmt: skip
"""By algorithm and environment."""


@dataclass(frozen=True)
class TimeOptions(PeerOptions):
    """Time to a score, each library with its best known settings: CartPole-v1 to 475, LunarLander-v3 to 200."""

    env: tuple[str, ...] = tuple(SCORES)
    """Environments to measure: one of these two, or both."""
    seeds: int = 3
    """Number of seeds; every library trains once per seed."""
    cap: float = 300.0
    """Time limit of a run in seconds."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ("CartPole-v1",), "seeds": 1, "cap": 15.0}

    def environments(self) -> list[str]:
        return list(self.env)

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        strange = [env for env in self.env if env not in SCORES]
        found = super().problems()
        return found + [f"there is no score for {env}, only for {', '.join(SCORES)}" for env in strange]


OPTIONS = TimeOptions


def run(options: TimeOptions, say: Say) -> Report:
    """Measure and report."""
    peers = Peers(options.peers_folder, say)
    rows = []
    for env in options.env:
        say(f"{env}: seconds to a mean return of {SCORES[env]:.0f}")
        rows += _rows(env, options, peers, say)
    notes = (
        f"Wall seconds from the start of the process, imports and compilation included, until the mean return of the "
        f"last 100 training episodes is reached; median of {options.seeds} seed(s) (lowest to highest), libraries in "
        f"turns, at most {options.cap:.0f} s each. Shoal with its presets on all cores; the others with the settings "
        f"of rl-zoo, all environments in-process as rl-zoo runs them, and one thread or the library's own number of "
        f"threads, whichever was faster in a trial. {machine.facts(peers.versions())}"
    )
    header = ["environment", "", "reached", "seconds", "environment steps", "relative to Shoal's fastest"]
    return Report("time", markdown_table(header, rows), notes)


def _rows(env: str, options: TimeOptions, peers: Peers, say: Say) -> list[list[str]]:
    """Make a row for each library: how often it reached the score, in what time and how many steps."""
    programs, steps = _programs(env, options, peers, say), dict[str, list[int]]()

    def attempt(name: str, seed: int) -> float:
        if name not in OURS:
            peers.check()
        reached = reach(programs[name](seed), SCORES[env], options.cap)
        steps.setdefault(name, []).append(reached.steps)
        return reached.seconds

    sides = {name: partial(attempt, name) for name in programs}
    found = rounds.measure(sides, options.seeds, say)
    middles = {name: spread(rounds.numbers(found, name)) for name in programs}
    ours = {name: middle.middle for name in OURS if (middle := middles.get(name)) is not None}
    fastest = min(ours, key=ours.__getitem__, default=None)
    rows = []
    for name in programs:
        count, failed = len(rounds.numbers(found, name)), rounds.failure(found, name)
        reached = f"{count} of {len(found)}" if failed is None else f"{count} of {len(found)}: {failed}"
        ratio = None if fastest in (None, name) else spread(rounds.ratios(found, name, str(fastest)))
        rows.append([env, name, reached, seconds(middles[name]), counted(spread(steps.get(name, []))), times(ratio)])
    return rows


OURS = {"Shoal PPO": "ppo", "Shoal TRPO": "trpo"}
THEIRS = {
    "Stable-Baselines3 PPO": ("sb3", "PPO"),
    "SBX PPO": ("sbx", "PPO"),
    "sb3-contrib TRPO": ("sb3-contrib", "TRPO"),
}


def _programs(env: str, options: TimeOptions, peers: Peers, say: Say) -> dict[str, Callable[[int], TrainingProgram]]:
    """For each library, how to start it with a seed. Shoal's algorithms take part if they have a preset."""
    found: dict[str, Callable[[int], TrainingProgram]] = {
        name: partial(_ours, algo, env) for name, algo in OURS.items() if presets.find_preset(algo, env) is not None
    }
    for name, (library, algo) in THEIRS.items():
        start = partial(_theirs, peers, library, algo, env)
        found[name] = partial(start, _threads(name, start, options, peers, say))
    return found


def _ours(algo: str, env: str, seed: int) -> TrainingProgram:
    return shoal_program(algo, env, [f"--seed={seed}"])


def _theirs(peers: Peers, library: str, algo: str, env: str, threads: int | None, seed: int) -> TrainingProgram:
    zoo = ZOO[algo, env]
    layout = EnvLayout(zoo["envs"], threads=threads)
    return peers.stable_baselines(library, algo, env, layout, zoo["settings"], zoo["steps"], seed)


def _threads(
    name: str, start: Callable[[int | None, int], TrainingProgram], options: TimeOptions, peers: Peers, say: Say
) -> int | None:
    """Find out whether a library is faster with one thread or with its own number of threads."""
    ways = {"1 thread": 1, "its own number of threads": None}
    if options.quick or peers.missing is not None:
        return 1
    say(f"  scouting {name}")
    return ways[scout(ways, lambda way: rate(start(ways[way], 0), SCOUTING), say)]
