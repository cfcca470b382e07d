"""Evaluation during training: greedy episodes as ordinary tasks, on seeds that no training episode uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.algos.base import Step
from shoal.base import disk
from shoal.engines.base import Engine
from shoal.runs.metrics import MetricsRow
from shoal.runs.settings import Settings
from shoal.sampling.evaluation import LANES, WIDTH, evaluate_policy


class Evaluator:
    """Evaluates the policy whenever training has passed another `eval_every` steps.

    Every evaluation plays the same episodes, so their means differ only where the policies do.
    """

    def __init__(
        self, engine: Engine, settings: Settings, best_file: Path | None = None, rows: Sequence[MetricsRow] = ()
    ) -> None:
        self._engine, self._settings, self._best_file = engine, settings, best_file
        self._steps = rows[-1]["time/total_timesteps"] if rows else 0
        self._best = max((row["eval/mean_reward"] for row in rows if "eval/mean_reward" in row), default=-float("inf"))

    def due(self, step: Step) -> bool:
        """Test whether a multiple of `eval_every` was passed since the last call."""
        every, before = self._settings.eval_every, self._steps
        self._steps = int(step.metrics["time/total_timesteps"])
        return every > 0 and self._steps // every > before // every

    def metrics(self, step: Step) -> dict[str, float]:
        """Evaluate a step's policy, and save it if no earlier one had a higher mean return."""
        count = self._settings.eval_episodes
        width = min(WIDTH, -(-count // LANES))
        found = evaluate_policy(
            self._engine, step.policy, count, self._settings.seed, purpose="eval-in-training", width=width
        )
        if found.mean > self._best:
            self._best = found.mean
            if self._best_file is not None:
                disk.write_file(self._best_file, step.policy.to_bytes())
        return found.metrics()
