"""The rule by which trials end early."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

LEAST = 4
"""Returns that a rung needs before trials are pruned there."""


class MedianRule:
    """Prunes a trial whose return at a rung is below the median of all trials that have reached this rung.

    A rung is a fixed number of environment steps, and all trials of a batch are judged together there. So decisions
    depend only on the trials up to and including this batch, not on which run arrived first.
    """

    def __init__(self) -> None:
        self._returns: dict[int, list[float]] = {}

    def judge(self, rung: int, returns: Sequence[float | None]) -> list[bool]:
        """Decide which trials of a batch to prune; a return of None, where no episode has ended yet, never counts."""
        known = self._returns.setdefault(rung, [])
        known += [value for value in returns if value is not None]
        if len(known) < LEAST:
            return [False] * len(returns)
        return [value is not None and value < self.median(rung) for value in returns]

    def median(self, rung: int) -> float:
        """Return the median at a rung so far."""
        return statistics.median(self._returns[rung])
