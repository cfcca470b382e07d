"""When a run ends."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.runs.metrics import MetricsRow


@dataclass(frozen=True)
class Goal:
    """A number of environment steps or, if given, a number of iterations."""

    steps: int
    iterations: int | None = None

    def progress(self, row: MetricsRow) -> float:
        """Compute how much of the goal is reached, from 0 to 1."""
        if self.iterations is not None:
            return min(row["iteration"] / self.iterations, 1.0)
        return min(row["time/total_timesteps"] / self.steps, 1.0)

    def reached(self, row: MetricsRow) -> bool:
        """Test whether the run is finished after this iteration."""
        return self.progress(row) >= 1

    def __str__(self) -> str:
        return f"{self.steps:,} steps" if self.iterations is None else f"{self.iterations} iterations"
