"""Networks, written once over the array namespace: NumPy on a worker, JAX on the head.

Parameters are one flat float32 vector: cheap to ship, to hash and to update; layers are views of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.base.blas import one_thread

ACTIVATIONS = ("tanh", "relu", "sigmoid", "softsign", "identity")


def activate(name: str, x: Any) -> Any:
    """An activation by name."""
    if name == "identity":
        return x
    xp = x.__array_namespace__()
    if name == "tanh":
        return xp.tanh(x)
    if name == "relu":
        return xp.maximum(x, 0)
    if name == "sigmoid":
        return 0.5 * xp.tanh(0.5 * x) + 0.5  # as 1 / (1 + exp(-x)), and never overflows
    return x / (1 + xp.abs(x))


@dataclass(frozen=True)
class MLP:
    """A feed-forward network. `sizes` runs from inputs over hidden layers, if any, to outputs."""

    sizes: tuple[int, ...]
    activation: str = "tanh"
    output: str = "identity"
    """Activation of the outputs."""

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
        """(weights (in, out), bias (out,)) of each layer, as views of the flat vector.

        Stacked, (weights (width, in, out), bias (width, 1, out)): for inputs (width, 1, in).
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

    def apply(self, layers: Sequence[tuple[Any, Any]], x: Any) -> Any:
        """Outputs (..., out) for inputs (..., in)."""
        *hidden, (weights, bias) = layers
        for hidden_weights, hidden_bias in hidden:
            x = x @ hidden_weights
            x += hidden_bias  # in place in NumPy, which saves a worker a third of the pass; a new array in JAX
            x = activate(self.activation, x)
        x = x @ weights
        x += bias
        return activate(self.output, x)

    def by_row(self, stacked: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """For workers: outputs (width, out) for inputs (width, in), where each row meets parameters of its own.

        Between steps of environments caches are cold, so each call and each new array shows. Biases are multiplied
        along: they lie behind their weights, and each row of inputs ends with a one.
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

    def __call__(self, flat: Any, x: Any) -> Any:
        """Outputs (..., out) from the flat parameters."""
        return self.apply(self.layers(flat), x)

    def _shapes(self) -> list[tuple[int, int]]:
        return list(zip(self.sizes[:-1], self.sizes[1:], strict=True))


@dataclass(frozen=True)
class Recurrent(MLP):
    """A network whose hidden layers remember: Elman's (1990), or LSTM (Hochreiter and Schmidhuber, 1997).

    A hidden layer sees its inputs and its own last outputs side by side. What it remembers is one row of `remembered`
    numbers, zeros at the beginning of an episode. Only for workers: it takes one step at a time.
    """

    cell: str = "elman"

    @property
    def remembered(self) -> int:
        """How many numbers it remembers: outputs of hidden layers, and what LSTM cells hold."""
        return sum(self.sizes[1:-1]) * (2 if self.cell == "lstm" else 1)

    def step(self, layers: Sequence[tuple[Any, Any]], x: Any, memory: Any) -> Any:
        """Outputs (..., out) for inputs (..., in); `memory` (..., remembered) is changed in place."""
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
                # A new cell keeps most of what it holds: the usual bias of 1.
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
        common, value, advantages = self.parts
        *below, value_1, value_2, advantages_1, advantages_2 = layers
        if below:
            x = activate(self.activation, common.apply(below, x))
        over = advantages.apply((advantages_1, advantages_2), x)
        return value.apply((value_1, value_2), x) + over - over.mean(axis=-1, keepdims=True)

    def __call__(self, flat: Any, x: Any) -> Any:
        """Outputs (..., out) from the flat parameters."""
        return self.apply(self.layers(flat), x)


def _orthogonal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    tall = rng.standard_normal((max(rows, columns), min(rows, columns)))
    with one_thread():  # the decomposition must not depend on the head's cores
        q, r = np.linalg.qr(tall)
    q *= np.sign(np.diagonal(r))
    return q if rows >= columns else q.T
