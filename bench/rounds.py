"""Interleaved measuring: in each round every side takes its turn, and what counts are ratios within a round.

A machine that is slow for a minute is slow for every side of that round, so a ratio survives what a time does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.options import Say


class SideFailed(Exception):
    """A side could not be measured. The message is what the table says instead of a number."""


@dataclass(frozen=True)
class Spread:
    """The middle of some numbers, with the lowest and the highest."""

    middle: float
    low: float
    high: float


Round = Mapping[str, float | SideFailed]
"""What one round found for each side: a number, or why there is none."""


def spread(numbers: Iterable[float]) -> Spread | None:
    """Median, lowest and highest; None of no numbers."""
    found = sorted(numbers)
    return Spread(statistics.median(found), found[0], found[-1]) if found else None


def measure(sides: Mapping[str, Callable[[int], float]], rounds: int, say: Say) -> list[Round]:
    """Call every side with the round's number, in turns. One that fails has its reason in its place; the rest go on."""
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
    """What a side reached, in the rounds in which it was measured."""
    return [value for one in rounds if not isinstance(value := one[side], SideFailed)]


def ratios(rounds: Sequence[Round], side: str, other: str) -> list[float]:
    """How many times `other` a side reached, in each round in which both were measured."""
    pairs = [(one[side], one[other]) for one in rounds]
    return [a / b for a, b in pairs if not isinstance(a, SideFailed) and not isinstance(b, SideFailed)]


def failure(rounds: Sequence[Round], side: str) -> SideFailed | None:
    """Why a side was not measured in the last round in which it was not."""
    return next((value for one in reversed(rounds) if isinstance(value := one[side], SideFailed)), None)


def _brief(value: float | SideFailed) -> str:
    return "failed" if isinstance(value, SideFailed) else f"{value:,.0f}"
