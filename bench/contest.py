"""Libraries at equal settings, in steps per second of training.

A scouting pass tries every setting of every library once on an environment. Then each library runs with its best
setting in all rounds, in turns with the others and with two bare processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import shoal
from bench import rounds
from bench.bare import bare_rate
from bench.options import Say
from bench.peers import Peers
from bench.report import counted, percent, times
from bench.rounds import Round, SideFailed
from bench.watch import TrainingProgram, rate
from shoal.envs.make import EnvSpec
from shoal.reports.tables import markdown_table
from shoal.sampling.tasks import describe

BARE = "2 bare processes"


@dataclass(frozen=True)
class Entry:
    """A library and the settings worth trying; the best known comes first."""

    name: str
    settings: Mapping[str, TrainingProgram]
    peer: bool = True
    """Whether the library needs the peers' virtualenv."""


@dataclass(frozen=True)
class ContestResult:
    """The measurements on one environment."""

    env: str
    chosen: Mapping[str, str]
    """The setting that each library ran with."""
    rounds: Sequence[Round]


def contest(
    env: str, entries: Sequence[Entry], peers: Peers, count: int, seconds: float, quick: bool, say: Say
) -> ContestResult:
    """Scout, then measure in `count` rounds. The first entry must be Shoal."""

    def measured(entry: Entry, setting: str, _: int = 0) -> float:
        if entry.peer:
            peers.check()
        return rate(entry.settings[setting], seconds)

    chosen = {}
    for entry in entries:
        if quick or len(entry.settings) == 1:
            chosen[entry.name] = next(iter(entry.settings))
        else:
            say(f"{env}: scouting the settings of {entry.name}")
            chosen[entry.name] = scout(entry.settings, partial(measured, entry), say)
    with shoal.engine("processes", workers=2) as engine:
        engine.map(describe, [EnvSpec(env).to_record()] * 2)
        sides: dict[str, Callable[[int], float]] = {BARE: lambda _: bare_rate(engine, env, seconds)}
        for entry in entries:
            sides[entry.name] = partial(measured, entry, chosen[entry.name])
        say(f"{env}: steps per second")
        return ContestResult(env, chosen, rounds.measure(sides, count, say))


def scout(settings: Iterable[str], measured: Callable[[str], float], say: Say) -> str:
    """Try each setting once and return the fastest, or the first if none could be measured."""
    found: dict[str, float] = {}
    for setting in settings:
        try:
            found[setting] = measured(setting)
        except SideFailed as failure:
            say(f"  {setting}: {failure}")
        else:
            say(f"  {setting}: {found[setting]:,.0f} steps/s")
    return max(found, key=found.__getitem__) if found else next(iter(settings))


def contest_table(outcomes: Sequence[ContestResult]) -> str:
    """Format a table with one row for each library on each environment."""
    header = ["environment", "", "setting", "steps/s", f"share of {BARE}", "Shoal's speed-up"]
    rows = []
    for outcome in outcomes:
        _, ours, *_ = sides = list(outcome.rounds[0])
        for side in sides:
            failed = rounds.failure(outcome.rounds, side)
            setting = outcome.chosen.get(side, "no policy, no learning")
            if failed is not None:
                missed = sum(isinstance(one[side], SideFailed) for one in outcome.rounds)
                setting += f"; failed in {missed} of {len(outcome.rounds)} rounds: {failed}"
            speed = rounds.spread(rounds.numbers(outcome.rounds, side))
            share = rounds.spread(rounds.ratios(outcome.rounds, side, BARE)) if side != BARE else None
            lead = rounds.spread(rounds.ratios(outcome.rounds, ours, side)) if side not in (BARE, ours) else None
            rows.append([outcome.env, side, setting, counted(speed), percent(share), times(lead)])
    return markdown_table(header, rows)
