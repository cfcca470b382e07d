"""Networks, written once over the array namespace: NumPy on a worker, JAX in the learner.

Parameters are one flat float32 vector, which is cheap to ship, hash and update; layers are views of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.base.arrays import Array
from shoal.base.blas import one_thread


def activate(name: str, x: Array) -> Array:
    """Apply an activation: tanh, relu, sigmoid, softsign or identity."""
    if name == "identity":
        return x
    xp = x.__array_namespace__()
    if name == "tanh":
        return xp.tanh(x)
    if name == "relu":
        return xp.maximum(x, 0)
    if name == "sigmoid":
        return 0.5 * xp.tanh(0.5 * x) + 0.5  # equals 1 / (1 + exp(-x)) and never overflows
    return x / (1 + xp.abs(x))


@dataclass(frozen=True)
class MLP:
    """A feed-forward network. `sizes` lists inputs, hidden layers (if any) and outputs."""

    sizes: tuple[int, ...]
    activation: str = "tanh"
    output: str = "identity"
    """Activation of the output layer."""

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum((rows + 1) * columns for rows, columns in self._shapes())

    def init(self, rng: np.random.Generator, out_scale: float) -> np.ndarray:
        """Draw orthogonal weights and zero biases (count,) float32; `out_scale` is the gain of the last layer."""
        shapes = self._shapes()
        gains = [math.sqrt(2.0)] * (len(shapes) - 1) + [out_scale]
        parts = []
        for (rows, columns), gain in zip(shapes, gains, strict=True):
            parts += [gain * _orthogonal(rng, rows, columns).ravel(), np.zeros(columns)]
        return np.concatenate(parts).astype(np.float32)

    def layers(self, flat: Array) -> list[tuple[Array, Array]]:
        """Split the flat vector into views: (weights (in, out), bias (out,)) of each layer.

        Stacked parameters (width, count) give weights (width, in, out) and biases (width, 1, out), for inputs
        (width, 1, in).
        """
        views, start = [], 0
        for rows, columns in self._shapes():
            middle, end = start + rows * columns, start + (rows + 1) * columns
            if flat.ndim == 1:
                views.append((flat[start:middle].reshape(rows, columns), flat[middle:end]))
            else:
                views.append((flat[:, start:middle].reshape(-1, rows, columns), flat[:, None, middle:end]))
            start = end
        return views

    def apply(self, layers: Sequence[tuple[Array, Array]], x: Array) -> Array:
        """Compute outputs (..., out) for inputs (..., in)."""
        *hidden, (weights, bias) = layers
        for hidden_weights, hidden_bias in hidden:
            x = x @ hidden_weights
            x += hidden_bias  # in place in NumPy, which saves a worker a third of the pass; a new array in JAX
            x = activate(self.activation, x)
        x = x @ weights
        x += bias
        return activate(self.output, x)

    def by_row(self, stacked: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Build the forward pass (width, in) -> (width, out) for stacked parameters: each row has its own weights.

        Caches are cold between environment steps, so every call and every new array costs. The bias is part of the
        matrix product: it follows its weights in memory, and each row of inputs ends with a one.
        """
        width, start = len(stacked), 0
        matrices, rooms = [], []
        for rows, columns in self._shapes():
            end = start + (rows + 1) * columns
            matrices.append(stacked[:, start:end].reshape(width, rows + 1, columns))
            rooms.append(np.ones((width, 1, rows + 1), np.float32))
            start = end
        inputs = rooms[0][:, 0, :-1]
        hidden = [(rooms[at], matrices[at], rooms[at + 1][..., :-1]) for at in range(len(rooms) - 1)]

        def compute(x: np.ndarray) -> np.ndarray:
            inputs[:] = x
            for below, matrix, above in hidden:
                np.matmul(below, matrix, out=above)
                if self.activation == "tanh":
                    np.tanh(above, out=above)
                else:
                    above[:] = activate(self.activation, above)
            out: np.ndarray = activate(self.output, np.matmul(rooms[-1], matrices[-1])[:, 0])
            return out

        return compute

    def __call__(self, flat: Array, x: Array) -> Array:
        """Compute outputs (..., out) from the flat parameters."""
        return self.apply(self.layers(flat), x)

    def _shapes(self) -> list[tuple[int, int]]:
        return list(zip(self.sizes[:-1], self.sizes[1:], strict=True))


@dataclass(frozen=True)
class Recurrent(MLP):
    """A recurrent network: Elman (1990) or LSTM (Hochreiter and Schmidhuber, 1997).

    Each hidden layer sees its inputs concatenated with its previous outputs. The recurrent state of a slot is one row
    of `remembered` numbers, zero at the start of an episode. For workers only: it takes one step at a time.
    """

    cell: str = "elman"

    @property
    def remembered(self) -> int:
        """Size of the recurrent state: outputs of the hidden layers and, for LSTM, the cell states."""
        return sum(self.sizes[1:-1]) * (2 if self.cell == "lstm" else 1)

    def step(self, layers: Sequence[tuple[Array, Array]], x: Array, memory: Array) -> Array:
        """Compute outputs (..., out) for inputs (..., in), and update `memory` (..., remembered) in place."""
        *hidden, (weights, bias) = layers
        start = 0
        for (hidden_weights, hidden_bias), size in zip(hidden, self.sizes[1:-1], strict=True):
            before = memory[..., start : start + size]
            summed = np.concatenate([x, before], axis=-1) @ hidden_weights
            summed += hidden_bias
            start += size
            if self.cell == "elman":
                x = activate(self.activation, summed)
            else:
                held = memory[..., start : start + size]
                start += size
                enter, forget, leave, new = (summed[..., part * size : (part + 1) * size] for part in range(4))
                # The usual forget bias of 1: a new cell keeps most of its state.
                held[...] = activate("sigmoid", forget + 1) * held + activate("sigmoid", enter) * np.tanh(new)
                x = activate("sigmoid", leave) * activate(self.activation, held)
            before[...] = x
        x = x @ weights
        x += bias
        return activate(self.output, x)

    def _shapes(self) -> list[tuple[int, int]]:
        gates = 4 if self.cell == "lstm" else 1
        inputs, *hidden, outputs = self.sizes
        below = [inputs, *hidden]
        cells = [(size + own, gates * own) for size, own in zip(below, hidden, strict=False)]
        return [*cells, (below[-1], outputs)]


@dataclass(frozen=True)
class Dueling:
    """Dueling network (Wang et al., 2016): Q-values from separate state-value and advantage streams.

    The streams share all hidden layers but the last, of which each has its own.
    """

    sizes: tuple[int, ...]
    activation: str = "tanh"

    @functools.cached_property
    def parts(self) -> tuple[MLP, MLP, MLP]:
        """The shared layers, the value stream and the advantage stream."""
        inputs, *common, last, outputs = self.sizes
        return (
            MLP((inputs, *common), self.activation),
            MLP(((inputs, *common)[-1], last, 1), self.activation),
            MLP(((inputs, *common)[-1], last, outputs), self.activation),
        )

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(part.count for part in self.parts)

    def init(self, rng: np.random.Generator, out_scale: float) -> np.ndarray:
        """Draw parameters (count,) float32 as `MLP.init` does."""
        scaled = zip(self.parts, (math.sqrt(2.0), out_scale, out_scale), strict=True)
        return np.concatenate([part.init(rng, scale) for part, scale in scaled if part.count])

    def layers(self, flat: Array) -> list[tuple[Array, Array]]:
        """Split the flat vector as `MLP.layers` does, part by part."""
        views, start = [], 0
        for part in self.parts:
            views += part.layers(flat[start : start + part.count])
            start += part.count
        return views

    def apply(self, layers: Sequence[tuple[Array, Array]], x: Array) -> Array:
        """Compute outputs (..., out) for inputs (..., in)."""
        common, value, advantages = self.parts
        *below, value_1, value_2, advantages_1, advantages_2 = layers
        if below:
            x = activate(self.activation, common.apply(below, x))
        over = advantages.apply((advantages_1, advantages_2), x)
        return value.apply((value_1, value_2), x) + over - over.mean(axis=-1, keepdims=True)

    def __call__(self, flat: Array, x: Array) -> Array:
        """Compute outputs (..., out) from the flat parameters."""
        return self.apply(self.layers(flat), x)


def _orthogonal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    tall = rng.standard_normal((max(rows, columns), min(rows, columns)))
    with one_thread():  # the decomposition must not depend on the number of cores
        q, r = np.linalg.qr(tall)
    q *= np.sign(np.diagonal(r))
    return q if rows >= columns else q.T
