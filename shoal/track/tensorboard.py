"""TensorBoard event files, beside the run's other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes every number under its own name, against environment steps as Stable-Baselines3 does."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """One point for each number."""
        steps = metrics.get("time/total_timesteps", iteration)
        for key, value in metrics.items():
            if "/" in key and isinstance(value, int | float):
                self._writer.add_scalar(key, value, steps)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
