"""DQN compared with Stable-Baselines3 and with a design that makes one remote call per transition, on CartPole-v1.

Measures environment steps and gradient steps per second once learning has started, and the time to a mean return of 195
and of 475.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from bench import machine, rounds
from bench.options import PeerOptions, Say
from bench.peers import EnvLayout, Peers
from bench.report import Report, counted, seconds, times
from bench.rounds import SideFailed, spread
from bench.watch import TrainingProgram, reach, shoal_program, stretch
from shoal.reports.tables import markdown_table

ENV = "CartPole-v1"
FOREVER = 10**9
LARGE, SMALL = (256, 256), (24, 48)
SCORES = (195.0, 475.0)
ZOO: dict[str, object] = {
    "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99,
    "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
}  # fmt: skip
"""Settings of rl-baselines3-zoo."""


@dataclass(frozen=True)
class DQNOptions(PeerOptions):
    """DQN compared with Stable-Baselines3 and with one remote call per transition, on CartPole-v1."""

    rounds: int = 5
    """Number of rounds; every library takes one turn in each."""
    seconds: float = 5.0
    """Minimum length of a turn in seconds, after the first gradient step."""
    seeds: int = 3
    """Number of seeds; every library trains to each score once per seed."""
    cap: float = 120.0
    """Time limit in seconds for a run to a score."""
    score: tuple[float, ...] = SCORES
    """Mean returns to train to; give none to measure only speed."""

    QUICK: ClassVar[dict[str, Any]] = {"rounds": 1, "seconds": 1.0, "score": ()}

    def environments(self) -> list[str]:
        return [ENV]


OPTIONS = DQNOptions


def run(options: DQNOptions, say: Say) -> Report:
    """Measure and report."""
    peers = Peers(options.peers_folder, say)
    notes = (
        f"{ENV}; minibatches of 64. Shoal and Stable-Baselines3 take a gradient step for every two environment steps; "
        f"Shoal with 2 workers and a lag of 1, Stable-Baselines3 with one environment, as in rl-zoo, and one thread. "
        f"The design with one remote call per transition has 2 actors, and takes gradient steps as fast as it can. "
        f"Median of {options.rounds} interleaved rounds of {options.seconds:g} s (lowest to highest). Times to a mean "
        f"return of the last 100 training episodes count from the start of the process: median of {options.seeds} "
        f"seed(s), at most {options.cap:.0f} s each; Shoal with its preset. {machine.facts(peers.versions())}"
    )
    tables = [_speed(options, peers, say)] + ([_time(options, peers, say)] if options.score else [])
    return Report("dqn", "\n\n".join(tables), notes)


def _speed(options: DQNOptions, peers: Peers, say: Say) -> str:
    programs = {
        "Shoal, 256x256": _shoal(LARGE),
        "Stable-Baselines3, 256x256": _sb3(peers, LARGE),
        "Shoal, 24x48": _shoal(SMALL),
        "Stable-Baselines3, 24x48": _sb3(peers, SMALL),
        "one call per transition, 24x48": _ray(peers, 0),
    }
    learning, acting = list[rounds.Round](), list[rounds.Round]()
    say(f"{ENV}: gradient steps per second")
    for number in range(options.rounds):
        acted: dict[str, float | SideFailed] = {}
        sides = {name: partial(_measured, program, options, acted, name) for name, program in programs.items()}
        learning += rounds.measure(sides, 1, say)
        acting.append({name: acted.get(name, SideFailed("not measured")) for name in programs})
        say(f"  finished round {number + 1} of {options.rounds}")
    header = ["", "gradient steps/s", "Shoal's speed-up", "environment steps/s", "Shoal's speed-up"]
    rows = []
    for name in programs:
        ours = f"Shoal, {name.rpartition(', ')[2]}"
        row = [name]
        for found in (learning, acting):
            lead = None if name == ours else spread(rounds.ratios(found, ours, name))
            row += [counted(spread(rounds.numbers(found, name))), times(lead)]
        failed = rounds.failure(learning, name)
        rows.append([f"{name}: {failed}" if failed else name, *row[1:]])
    return markdown_table(header, rows)


def _measured(
    program: TrainingProgram, options: DQNOptions, acted: dict[str, float | SideFailed], name: str, _: int
) -> float:
    """Return gradient steps per second, and put environment steps per second into `acted`."""
    first, last = stretch(program, options.seconds, lambda _, line: line.updates > 0)
    passed = last.seconds - first.seconds
    acted[name] = (last.steps - first.steps) / passed
    if last.updates == first.updates:
        raise SideFailed(f"no gradient step in {passed:.0f} s")
    return (last.updates - first.updates) / passed


def _time(options: DQNOptions, peers: Peers, say: Say) -> str:
    programs: dict[str, Callable[[int], TrainingProgram]] = {
        "Shoal": lambda seed: shoal_program("dqn", ENV, [f"--seed={seed}", "--workers=2"]),
        "Stable-Baselines3": lambda seed: _sb3(peers, LARGE, seed, 50_000),
        "one call per transition": partial(_ray, peers),
    }
    rows = []
    for score in options.score:
        say(f"{ENV}: seconds to a mean return of {score:.0f}")
        sides = {name: partial(_reached, start, score, options.cap) for name, start in programs.items()}
        found = rounds.measure(sides, options.seeds, say)
        for name in programs:
            count, failed = len(rounds.numbers(found, name)), rounds.failure(found, name)
            reached = f"{count} of {len(found)}" + (f": {failed}" if failed else "")
            lead = None if name == "Shoal" else spread(rounds.ratios(found, name, "Shoal"))
            rows.append([f"{score:.0f}", name, reached, seconds(spread(rounds.numbers(found, name))), times(lead)])
    return markdown_table(["score", "", "reached", "seconds", "Shoal's speed-up"], rows)


def _reached(start: Callable[[int], TrainingProgram], score: float, cap: float, seed: int) -> float:
    return reach(start(seed), score, cap).seconds


def _shoal(hidden: tuple[int, ...]) -> TrainingProgram:
    words = [
        "--no-preset", "--workers=2", "--lanes=2", "--width=4", f"--steps={FOREVER}", "--hidden", *map(str, hidden),
        "--minibatch=64", "--batch-steps=256", "--replay-ratio=0.5", "--learning-starts=1000", "--lr=2.3e-3",
        "--target-every=128", "--buffer-size=100000", "--lag=1", "--no-double",
    ]  # fmt: skip
    return shoal_program("dqn", ENV, words)


def _sb3(peers: Peers, hidden: tuple[int, ...], seed: int = 0, steps: int = FOREVER) -> TrainingProgram:
    settings = ZOO | {"policy_kwargs": {"net_arch": list(hidden)}}
    return peers.stable_baselines("sb3", "DQN", ENV, EnvLayout(1, threads=1), settings, steps, seed)


def _ray(peers: Peers, seed: int) -> TrainingProgram:
    return peers.program("ray_dqn", {"env": ENV, "actors": 2, "seed": seed}, threads=1)
