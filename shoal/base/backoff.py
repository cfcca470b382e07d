"""Exponential back-off: growing pauses between attempts."""

from __future__ import annotations


class Backoff:
    """Pauses that grow from `first` by `factor` up to `longest` seconds, until a success resets them."""

    def __init__(self, first: float, longest: float, factor: float = 2.0) -> None:
        self.first, self.longest, self.factor = first, longest, factor
        self._next = first

    def next(self) -> float:
        """Return the seconds to pause before the next attempt, and lengthen the one after it."""
        pause = self._next
        self._next = min(pause * self.factor, self.longest)
        return pause

    def reset(self) -> None:
        """Start again from the shortest pause."""
        self._next = self.first
