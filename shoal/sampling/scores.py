"""Returns and lengths of recent episodes, and counts of all steps and episodes of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from shoal.sampling.record import EpisodeScores


class ScoresState(TypedDict):
    """`Scores` as checkpoints store them."""

    steps: int
    episodes: int
    returns: np.ndarray
    """(up to WINDOW,) float64."""
    lengths: np.ndarray
    """(up to WINDOW,) int64."""


class Scores:
    """Return and length of the last hundred episodes, and counts of all steps and episodes."""

    WINDOW = 100

    def __init__(self, state: ScoresState | None = None) -> None:
        self.steps = 0 if state is None else int(state["steps"])
        self.episodes = 0 if state is None else int(state["episodes"])
        self._returns = deque([] if state is None else state["returns"].tolist(), self.WINDOW)
        self._lengths = deque([] if state is None else state["lengths"].tolist(), self.WINDOW)

    def add(self, records: Sequence[EpisodeScores]) -> None:
        """Add records, in lane order."""
        for record in records:
            self.steps += int(record["steps"].sum()) - len(record["skipped"])
            self.episodes += len(record["returns"])
            self._returns.extend(record["returns"].tolist())
            self._lengths.extend(record["lengths"].tolist())

    def metrics(self) -> dict[str, float]:
        """Report under the names that Stable-Baselines3 uses."""
        metrics: dict[str, float] = {"time/total_timesteps": self.steps, "rollout/episodes": self.episodes}
        if self._returns:
            metrics["rollout/ep_rew_mean"] = float(np.mean(self._returns))
            metrics["rollout/ep_len_mean"] = float(np.mean(self._lengths))
        return metrics

    def state(self) -> ScoresState:
        """Convert to plain data, for checkpoints."""
        return {
            "steps": self.steps,
            "episodes": self.episodes,
            "returns": np.array(self._returns, np.float64),
            "lengths": np.array(self._lengths, np.int64),
        }
