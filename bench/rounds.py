"""Interleaved measurements: every side takes one turn in each round, and only ratios within a round are compared.

A machine that is slow for a minute is slow for every side of that round, which changes times but hardly any ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.options import Say


class SideFailed(Exception):
    """A side could not be measured. The table has the message instead of a number."""


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some numbers."""

    middle: float
    low: float
    high: float


Round = Mapping[str, float | SideFailed]
"""The measurement of each side in one round, or why it failed."""


def spread(numbers: Iterable[float]) -> Spread | None:
    """Return median, lowest and highest; None if there are no numbers."""
    found = sorted(numbers)
    return Spread(statistics.median(found), found[0], found[-1]) if found else None


def measure(sides: Mapping[str, Callable[[int], float]], rounds: int, say: Say) -> list[Round]:
    """Call every side with the number of the round, in turns. A failure is recorded, and the other sides go on."""
    found: list[Round] = []
    for number in range(rounds):
        one: dict[str, float | SideFailed] = {}
        for name, side in sides.items():
            try:
                one[name] = side(number)
            except SideFailed as failure:
                one[name] = failure
        say(f"  round {number + 1} of {rounds}: " + ", ".join(f"{name} {_brief(one[name])}" for name in sides))
        found.append(one)
    return found


def numbers(rounds: Sequence[Round], side: str) -> list[float]:
    """Return the measurements of a side, without the rounds in which it failed."""
    return [value for one in rounds if not isinstance(value := one[side], SideFailed)]


def ratios(rounds: Sequence[Round], side: str, other: str) -> list[float]:
    """Return a side's measurement divided by another's, for each round in which neither failed."""
    pairs = [(one[side], one[other]) for one in rounds]
    return [a / b for a, b in pairs if not isinstance(a, SideFailed) and not isinstance(b, SideFailed)]


def failure(rounds: Sequence[Round], side: str) -> SideFailed | None:
    """Return a side's latest failure, if any."""
    return next((value for one in reversed(rounds) if isinstance(value := one[side], SideFailed)), None)


def _brief(value: float | SideFailed) -> str:
    return "failed" if isinstance(value, SideFailed) else f"{value:,.0f}"
