"""Running mean and variance of observations, computed in NumPy by the workers and the head alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np


class MomentsRecord(TypedDict):
    """`Moments` as plain data, in messages and checkpoints."""

    count: int
    mean: np.ndarray
    """(size,) float64"""
    m2: np.ndarray
    """(size,) float64"""


@dataclass(frozen=True)
class Moments:
    """Count of rows, with the mean (size,) and the sum of squared deviations (size,) of each column, in float64."""

    count: int
    mean: np.ndarray
    m2: np.ndarray

    @staticmethod
    def empty(size: int) -> Moments:
        return Moments(0, np.zeros(size), np.zeros(size))

    @staticmethod
    def of(rows: np.ndarray) -> Moments:
        """Compute the moments of rows (n, size)."""
        wide = rows.astype(np.float64)
        mean = wide.mean(axis=0)
        return Moments(len(rows), mean, ((wide - mean) ** 2).sum(axis=0))

    def merge(self, other: Moments) -> Moments:
        """Combine with other moments (Chan et al.). Not associative in the last bits: merge in a fixed order."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        m2 = self.m2 + other.m2 + delta**2 * (self.count * other.count / count)
        return Moments(count, mean, m2)

    def normaliser(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and 1 / standard deviation in float32; 0 and 1 before there are two rows."""
        if self.count < 2:
            return np.zeros(len(self.mean), np.float32), np.ones(len(self.mean), np.float32)
        return self.mean.astype(np.float32), (1.0 / np.sqrt(self.m2 / self.count + 1e-8)).astype(np.float32)

    def to_record(self) -> MomentsRecord:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    @staticmethod
    def from_record(record: MomentsRecord) -> Moments:
        return Moments(int(record["count"]), np.asarray(record["mean"]), np.asarray(record["m2"]))
