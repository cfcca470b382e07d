"""Trackers: whatever is told the metrics of each iteration. A tracker is `write` and `close`."""

from __future__ import annotations

from typing import Any, Protocol


class Tracker(Protocol):
    """Told once per iteration, in order, by the head's main thread."""

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """The metrics of one iteration."""

    def close(self) -> None:
        """No more will come."""
