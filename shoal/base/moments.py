"""Running moments of observations, for workers and the head alike. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.base.trees import Tree


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of rows of numbers, in float64."""

    count: int
    mean: np.ndarray
    m2: np.ndarray

    @staticmethod
    def empty(size: int) -> Moments:
        """No rows yet."""
        return Moments(0, np.zeros(size), np.zeros(size))

    @staticmethod
    def of(rows: np.ndarray) -> Moments:
        """Of rows (n, size)."""
        wide = rows.astype(np.float64)
        mean = wide.mean(axis=0)
        return Moments(len(rows), mean, ((wide - mean) ** 2).sum(axis=0))

    def merge(self, other: Moments) -> Moments:
        """Of both together (Chan et al.). Not associative in its last bits: merge in a fixed order."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        m2 = self.m2 + other.m2 + delta**2 * (self.count * other.count / count)
        return Moments(count, mean, m2)

    def normaliser(self) -> tuple[np.ndarray, np.ndarray]:
        """(mean, 1 / standard deviation) in float32; (0, 1) before there is any data."""
        if self.count < 2:
            return np.zeros(len(self.mean), np.float32), np.ones(len(self.mean), np.float32)
        return self.mean.astype(np.float32), (1.0 / np.sqrt(self.m2 / self.count + 1e-8)).astype(np.float32)

    def to_tree(self) -> Tree:
        """Plain data."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    @staticmethod
    def from_tree(tree: Tree) -> Moments:
        """The inverse of `to_tree`."""
        return Moments(int(tree["count"]), np.asarray(tree["mean"]), np.asarray(tree["m2"]))
