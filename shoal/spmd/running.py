"""Running mean and standard deviation of the rows that all ranks have seen."""

from __future__ import annotations

import numpy as np

from shoal.base.moments import Moments
from shoal.spmd.collectives import gathered


class Running:
    """Running mean and standard deviation of rows of a `shape`, with the same bits on every rank.

    observations = spmd.Running((8,))
    observations.update(batch)                                # every rank must call this
    normal = (batch - observations.mean) / observations.std
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = shape
        self.moments = Moments.empty(int(np.prod(shape)))

    def update(self, rows: np.ndarray) -> None:
        """Add the rows (n, *shape) of all ranks; n may differ and may be 0. Every rank must call this."""
        rows = np.asarray(rows)
        problem = ""
        if rows.shape[1:] != self.shape or rows.ndim == 0:
            problem = f"rows have shape {rows.shape}, not (n, {', '.join(map(str, self.shape))})"
        width = len(self.moments.mean)
        part = Moments.of(rows.reshape(len(rows), width)) if not problem and len(rows) else Moments.empty(width)
        parts = gathered("Running.update", np.concatenate([[part.count], part.mean, part.m2])[None], True, problem)
        for count, *moments in parts:
            self.moments = self.moments.merge(Moments(int(count), np.array(moments[:width]), np.array(moments[width:])))

    @property
    def count(self) -> int:
        """Number of rows added so far."""
        return self.moments.count

    @property
    def mean(self) -> np.ndarray:
        """Mean of all rows, (*shape); 0 before the first."""
        return self.moments.mean.reshape(self.shape)

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of all rows, (*shape), never 0; 1 before there are two rows."""
        if self.moments.count < 2:
            return np.ones(self.shape)
        return np.sqrt(self.moments.m2 / self.moments.count + 1e-8).reshape(self.shape)
