"""From the step of an algorithm to a complete row of metrics: speed, idle share and digests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from shoal.algos.base import Step
from shoal.base import trees
from shoal.engines.base import Engine
from shoal.runs.metrics import MetricsRow
from shoal.runs.usage import Usage


class Meter:
    """Measures one sitting of a run. `before` holds the last row of an earlier sitting, if there was one."""

    def __init__(self, engine: Engine, usage: Usage, before: Sequence[MetricsRow] = ()) -> None:
        self.begun = self._marked_at = time.monotonic()
        self._engine, self._usage = engine, usage
        self._steps_before = before[-1]["time/total_timesteps"] if before else 0
        self._seconds_before = before[-1]["time/time_elapsed"] if before else 0.0
        self._busy_before = engine.telemetry().busy_seconds
        self._first = True

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave a block out of what limits the run: its tasks are not those of an iteration."""
        begun, busy = time.monotonic(), self._engine.telemetry().busy_seconds
        yield
        self._marked_at += time.monotonic() - begun
        self._busy_before += self._engine.telemetry().busy_seconds - busy

    def row(self, iteration: int, step: Step, evaluation: Mapping[str, float]) -> MetricsRow:
        """Complete the metrics of a step; `evaluation` holds those of an evaluation after it, if there was one."""
        now, telemetry = time.monotonic(), self._engine.telemetry()
        steps = step.metrics["time/total_timesteps"] - self._steps_before
        wall = max(now - self._marked_at, 1e-9)
        busy = telemetry.busy_seconds - self._busy_before
        idle = 1.0 - busy / (wall * self._engine.workers)
        self._marked_at, self._busy_before = now, telemetry.busy_seconds
        self._usage.workers = self._engine.workers  # workers may have joined or left
        if not self._first:  # the first iteration includes start-up and compilation
            sampling, learning = step.metrics["time/sample_seconds"], step.metrics["time/learn_seconds"]
            self._usage.add(sampling, learning, busy, step.metrics.get("time/overlap_seconds", 0.0))
        self._first = False
        parts = trees.digests(step.learned)
        row = {
            "iteration": iteration,
            **step.metrics,
            **evaluation,
            "time/fps": steps / max(now - self.begun, 1e-9),
            "time/time_elapsed": self._seconds_before + now - self.begun,
            "time/idle_share": min(max(idle, 0.0), 1.0),
            "time/lost_workers": telemetry.lost_workers,
            "time/limited_by": self._usage.limit(),
            "time/workers": self._usage.workers,
            "time/workers_suited": self._usage.suited(),
            "digest": trees.digest(parts),
            "digests": parts,
        }
        return cast(MetricsRow, row)
