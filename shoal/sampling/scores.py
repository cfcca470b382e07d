"""Returns and lengths of recent episodes, and counts of all steps and episodes of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from shoal.base.trees import Tree


class Scores:
    """Return and length of the last hundred episodes, and counts of everything so far."""

    WINDOW = 100

    def __init__(self, state: Tree | None = None) -> None:
        self.steps = 0 if state is None else int(state["steps"])
        self.episodes = 0 if state is None else int(state["episodes"])
        self._returns = deque([] if state is None else state["returns"].tolist(), self.WINDOW)
        self._lengths = deque([] if state is None else state["lengths"].tolist(), self.WINDOW)

    def add(self, records: Sequence[Tree]) -> None:
        """Count records, in lane order."""
        for record in records:
            self.steps += int(record["steps"].sum()) - len(record["skipped"])
            self.episodes += len(record["returns"])
            self._returns.extend(record["returns"].tolist())
            self._lengths.extend(record["lengths"].tolist())

    def metrics(self) -> dict[str, float]:
        """What dashboards know under Stable-Baselines3's names."""
        metrics: dict[str, float] = {"time/total_timesteps": self.steps, "rollout/episodes": self.episodes}
        if self._returns:
            metrics["rollout/ep_rew_mean"] = float(np.mean(self._returns))
            metrics["rollout/ep_len_mean"] = float(np.mean(self._lengths))
        return metrics

    def state(self) -> Tree:
        """Plain data."""
        return {
            "steps": self.steps,
            "episodes": self.episodes,
            "returns": np.array(self._returns, np.float64),
            "lengths": np.array(self._lengths, np.int64),
        }
