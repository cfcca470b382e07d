"""Networks, written once over the array namespace: NumPy on a worker, JAX on the head.

Parameters are one flat float32 vector: cheap to ship, to hash and to update; layers are views of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits


@dataclass(frozen=True)
class MLP:
    """A feed-forward network. `sizes` runs from inputs over hidden layers to outputs."""

    sizes: tuple[int, ...]
    activation: str = "tanh"

    @property
    def count(self) -> int:
        """How many parameters."""
        return sum((rows + 1) * columns for rows, columns in self._shapes())

    def init(self, rng: np.random.Generator, out_scale: float) -> np.ndarray:
        """Orthogonal weights and zero biases: (count,) float32. `out_scale` is the gain of the last layer."""
        shapes = self._shapes()
        gains = [math.sqrt(2.0)] * (len(shapes) - 1) + [out_scale]
        parts = []
        for (rows, columns), gain in zip(shapes, gains, strict=True):
            parts += [gain * _orthogonal(rng, rows, columns).ravel(), np.zeros(columns)]
        return np.concatenate(parts).astype(np.float32)

    def layers(self, flat: Any) -> list[tuple[Any, Any]]:
        """(weights (in, out), bias (out,)) of each layer, as views of the flat vector."""
        views, start = [], 0
        for rows, columns in self._shapes():
            middle, end = start + rows * columns, start + (rows + 1) * columns
            views.append((flat[start:middle].reshape(rows, columns), flat[middle:end]))
            start = end
        return views

    def apply(self, layers: Sequence[tuple[Any, Any]], x: Any) -> Any:
        """Outputs (..., out) for inputs (..., in)."""
        xp = x.__array_namespace__()
        *hidden, (weights, bias) = layers
        for hidden_weights, hidden_bias in hidden:
            x = x @ hidden_weights
            x += hidden_bias  # in place in NumPy, which saves a worker a third of the pass; a new array in JAX
            x = xp.tanh(x) if self.activation == "tanh" else xp.maximum(x, 0)
        x = x @ weights
        x += bias
        return x

    def __call__(self, flat: Any, x: Any) -> Any:
        """Outputs (..., out) from the flat parameters."""
        return self.apply(self.layers(flat), x)

    def _shapes(self) -> list[tuple[int, int]]:
        return list(zip(self.sizes[:-1], self.sizes[1:], strict=True))


@dataclass(frozen=True)
class Dueling:
    """Values of actions as the value of the situation plus what each action has over their mean (Wang et al., 2016).

    The hidden layers but the last are common; then each of the two parts has a last hidden layer of its own.
    """

    sizes: tuple[int, ...]
    activation: str = "tanh"

    @functools.cached_property
    def parts(self) -> tuple[MLP, MLP, MLP]:
        """Common layers, value, advantages."""
        inputs, *common, last, outputs = self.sizes
        return (
            MLP((inputs, *common), self.activation),
            MLP(((inputs, *common)[-1], last, 1), self.activation),
            MLP(((inputs, *common)[-1], last, outputs), self.activation),
        )

    @property
    def count(self) -> int:
        """How many parameters."""
        return sum(part.count for part in self.parts)

    def init(self, rng: np.random.Generator, out_scale: float) -> np.ndarray:
        """As `MLP.init`: (count,) float32."""
        scaled = zip(self.parts, (math.sqrt(2.0), out_scale, out_scale), strict=True)
        return np.concatenate([part.init(rng, scale) for part, scale in scaled if part.count])

    def layers(self, flat: Any) -> list[tuple[Any, Any]]:
        """As `MLP.layers`, of all parts one after the other."""
        views, start = [], 0
        for part in self.parts:
            views += part.layers(flat[start : start + part.count])
            start += part.count
        return views

    def apply(self, layers: Sequence[tuple[Any, Any]], x: Any) -> Any:
        """Outputs (..., out) for inputs (..., in)."""
        xp = x.__array_namespace__()
        common, value, advantages = self.parts
        *below, value_1, value_2, advantages_1, advantages_2 = layers
        if below:
            x = common.apply(below, x)
            x = xp.tanh(x) if self.activation == "tanh" else xp.maximum(x, 0)
        over = advantages.apply((advantages_1, advantages_2), x)
        return value.apply((value_1, value_2), x) + over - over.mean(axis=-1, keepdims=True)

    def __call__(self, flat: Any, x: Any) -> Any:
        """Outputs (..., out) from the flat parameters."""
        return self.apply(self.layers(flat), x)


def _orthogonal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    tall = rng.standard_normal((max(rows, columns), min(rows, columns)))
    with threadpool_limits(1):  # the decomposition must not depend on the head's cores
        q, r = np.linalg.qr(tall)
    q *= np.sign(np.diagonal(r))
    return q if rows >= columns else q.T
