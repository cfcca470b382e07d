"""TensorBoard event files, in the folder of the run."""

from __future__ import annotations

from pathlib import Path

from shoal.runs.metrics import MetricsRow


class TensorBoard:
    """Writes every number under its name against environment steps, as Stable-Baselines3 does."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import FileWriter

        self._writer = FileWriter(str(folder), flush_secs=10)

    def write(self, metrics: MetricsRow) -> None:
        """Write all numbers as one event, because every event passes through a slow queue."""
        from tensorboardX.proto.summary_pb2 import Summary

        numbers = {key: value for key, value in metrics.items() if "/" in key and isinstance(value, int | float)}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._writer.add_summary(Summary(value=values), metrics["time/total_timesteps"])

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()
