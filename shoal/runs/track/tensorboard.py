"""TensorBoard event files, beside the run's other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes every number under its own name, against environment steps as Stable-Baselines3 does."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import FileWriter

        self._writer = FileWriter(str(folder), flush_secs=10)

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """One point for each number; all of them in one event, because each event passes through a slow queue."""
        from tensorboardX.proto.summary_pb2 import Summary

        numbers = {key: value for key, value in metrics.items() if "/" in key and isinstance(value, int | float)}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._writer.add_summary(Summary(value=values), metrics.get("time/total_timesteps", iteration))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
