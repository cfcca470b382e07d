"""Trackers: anything that receives the metrics of each iteration."""

from __future__ import annotations

from typing import Protocol

from shoal.runs.metrics import MetricsRow


class Tracker(Protocol):
    """Called by the head's main thread once per iteration, in order."""

    def write(self, metrics: MetricsRow) -> None:
        """Record the metrics of one iteration."""

    def close(self) -> None:
        """Finish: no more metrics will come."""
