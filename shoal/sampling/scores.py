"""Returns, lengths and infos of recent episodes, and counts of all steps and episodes of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

import numpy as np

from shoal.sampling.record import SUCCESS, EpisodeScores


class ScoresState(TypedDict):
    """`Scores` as checkpoints store them."""

    steps: int
    episodes: int
    returns: np.ndarray
    """(up to WINDOW,) float64."""
    lengths: np.ndarray
    """(up to WINDOW,) int64."""


WINDOW = 100
"""Metrics are means over this many recent episodes."""


class Scores:
    """Return and length of the last hundred episodes, and counts of all steps and episodes."""

    def __init__(self, state: ScoresState | None = None) -> None:
        self.steps = 0 if state is None else int(state["steps"])
        self.episodes = 0 if state is None else int(state["episodes"])
        self._returns = deque([] if state is None else state["returns"].tolist(), WINDOW)
        self._lengths = deque([] if state is None else state["lengths"].tolist(), WINDOW)

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


class Infos:
    """Numbers that the environment reported in `info` at the end of the last hundred episodes, by key.

    They are no part of `Scores`, whose state is learned from and digested: what a user monitors changes no digest.
    """

    def __init__(self, state: Mapping[str, np.ndarray] | None = None) -> None:
        self._values = {key: deque(values.tolist(), WINDOW) for key, values in (state or {}).items()}

    def add(self, records: Sequence[EpisodeScores]) -> None:
        """Add records, in lane order."""
        for record in records:
            for key, values in record.get("infos", {}).items():
                self._values.setdefault(key, deque(maxlen=WINDOW)).extend(values[~np.isnan(values)].tolist())

    def metrics(self) -> dict[str, float]:
        """Report the mean of each key."""
        return info_metrics("rollout", self._values)

    def state(self) -> dict[str, np.ndarray]:
        """Convert to plain data, for checkpoints."""
        return {key: np.array(values, np.float64) for key, values in self._values.items()}


def info_metrics(section: str, values: Mapping[str, Collection[float]]) -> dict[str, float]:
    """Name the means of infos as metrics: `is_success` becomes the success rate, as in Stable-Baselines3."""
    return {
        f"{section}/{'success_rate' if key == SUCCESS else key}": float(np.mean(list(found)))
        for key, found in values.items()
        if len(found)
    }
