"""What every export format shares: the named tensors of a policy, and the computation with them.

A format provides `Operations`, and `Computation` calls them: the ONNX graph appends a node for each call, the PyTorch
module computes it. Rows are (batch, ...) throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shoal.base.arrays import Array
from shoal.policies.actions import Bins, Categorical, Point
from shoal.policies.networks import Dueling, Recurrent
from shoal.policies.policy import CLIP, Policy, Weights


class Operations(Protocol):
    """Operations on the tensors of a format."""

    def tensor(self, name: str) -> Array:
        """Return a named tensor or constant of the policy."""

    def number(self, value: float) -> Array:
        """Make a float32 scalar."""

    def apply(self, operator: str, *inputs: Array) -> Array:
        """Apply an elementwise ONNX operator: Add, Max, Tanh, ..."""

    def features(self, observations: Array) -> Array:
        """Flatten observations (batch, *shape) to float32 (batch, inputs)."""

    def linear(self, x: Array, weight: str, bias: str) -> Array:
        """Compute `x @ weight.T + bias` with named tensors (out, in) and (out,)."""

    def part(self, x: Array, start: int, end: int) -> Array:
        """Take columns `start` to `end` of (batch, columns)."""

    def join(self, parts: Sequence[Array]) -> Array:
        """Join parts along the columns."""

    def mean(self, x: Array) -> Array:
        """Average the columns: (batch, 1)."""

    def argmax(self, x: Array) -> Array:
        """Find the largest column: (batch, 1) int64."""

    def take(self, table: Array, indices: Array) -> Array:
        """Look up int64 indices of any shape in a table (n,)."""

    def shaped(self, x: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Convert (batch, columns) to (batch, *shape) of a dtype."""


def tensors(policy: Policy, weights: Weights) -> dict[str, np.ndarray]:
    """Name everything learned as PyTorch does: weights are (out, in), gates of an LSTM in the order i, f, g, o."""
    found: dict[str, np.ndarray] = {}
    network, params = policy.network, weights["params"]
    for name, (matrix, bias) in zip(_layer_names(policy), network.layers(params), strict=True):
        if name.startswith("cells."):
            found |= _cell(name, matrix.T, bias, lstm=policy.memory == "lstm")
        else:
            found |= {f"{name}.weight": matrix.T, f"{name}.bias": bias}
    if policy.normalise:
        found |= {"observation.mean": weights["mean"], "observation.scale": weights["scale"]}
    if policy.distribution.free:
        found["log_std"] = params[network.count :]
    return {name: np.array(value, np.float32, order="C") for name, value in found.items()}


def _layer_names(policy: Policy) -> list[str]:
    network = policy.network
    if isinstance(network, Recurrent):
        return [*(f"cells.{at}" for at in range(len(policy.hidden))), "output"]
    if isinstance(network, Dueling):
        shared = [f"layers.{at}" for at in range(len(policy.hidden) - 1)]
        return [*shared, "value.0", "value.1", "advantage.0", "advantage.1"]
    return [f"layers.{at}" for at in range(len(policy.hidden) + 1)]


def _cell(name: str, matrix: np.ndarray, bias: np.ndarray, lstm: bool) -> dict[str, np.ndarray]:
    """Split the layer of a cell as `torch.nn.RNNCell` and `LSTMCell` do, which have two biases."""
    size = len(bias) // 4 if lstm else len(bias)
    if lstm:
        enter, forget, leave, new = np.split(np.arange(4 * size), 4)
        bias = bias.copy()
        bias[forget] += 1.0  # the constant that `Recurrent.step` adds
        order = np.concatenate([enter, forget, new, leave])
        matrix, bias = matrix[order], bias[order]
    inputs = matrix.shape[1] - size
    return {
        f"{name}.weight_ih": matrix[:, :inputs],
        f"{name}.weight_hh": matrix[:, inputs:],
        f"{name}.bias_ih": bias,
        f"{name}.bias_hh": np.zeros_like(bias),
    }


@dataclass(frozen=True)
class Computation:
    """From observations to distribution parameters, and from those to greedy actions."""

    policy: Policy

    @functools.cached_property
    def constants(self) -> dict[str, np.ndarray]:
        """Named arrays that follow from the action space."""
        distribution = self.policy.distribution
        if isinstance(distribution, Bins):
            values = distribution.values
            offsets = np.arange(len(values), dtype=np.int64) * values.shape[1]
            return {"action.values": values.ravel(), "action.offsets": offsets}
        if isinstance(distribution, Categorical):
            return {"action.start": np.array(distribution.start, np.int64)}
        low, high = distribution.bounds
        found = {"action.low": low, "action.high": high}
        return found | {"action.span": high - low} if self._scaled else found

    @property
    def action_type(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of one action, as `env.step` takes it."""
        distribution = self.policy.distribution
        if isinstance(distribution, Categorical) and not isinstance(distribution, Bins):
            return () if distribution.scalar else (len(distribution.choices),), np.dtype(np.int64)
        return distribution.shape, np.dtype(distribution.dtype)

    @property
    def outputs(self) -> int:
        """Number of distribution parameters that depend on the observation."""
        return self.policy.distribution.outputs - self.policy.distribution.free

    def output(self, ops: Operations, observations: Array, memory: Array = None) -> tuple[Array, Array]:
        """Compute distribution parameters, without `log_std`, and the new memory, which is None without recurrence."""
        x, network = self._features(ops, observations), self.policy.network
        if isinstance(network, Recurrent):
            return self._recurrent(ops, x, memory)
        if isinstance(network, Dueling):
            return self._dueling(ops, x), None
        *hidden, last = _layer_names(self.policy)
        for name in hidden:
            x = _activate(ops, network.activation, _linear(ops, x, name))
        return _activate(ops, network.output, _linear(ops, x, last)), None

    def action(self, ops: Operations, output: Array) -> Array:
        """Compute the most likely actions, as `env.step` takes them."""
        distribution = self.policy.distribution
        if isinstance(distribution, Categorical):
            ends = np.cumsum(distribution.choices).tolist()
            sizes = zip(ends, distribution.choices, strict=True)
            chosen = ops.join([ops.argmax(ops.part(output, end - size, end)) for end, size in sizes])
            if isinstance(distribution, Bins):
                places = ops.apply("Add", chosen, ops.tensor("action.offsets"))
                return ops.shaped(ops.take(ops.tensor("action.values"), places), *self.action_type)
            return ops.shaped(ops.apply("Add", chosen, ops.tensor("action.start")), *self.action_type)
        x, low, high = output, ops.tensor("action.low"), ops.tensor("action.high")
        if self._scaled:
            half = ops.number(0.5)
            share = ops.apply("Add", ops.apply("Mul", x, half), half)
            x = ops.apply("Add", ops.apply("Mul", share, ops.tensor("action.span")), low)
        return ops.shaped(_between(ops, x, low, high), *self.action_type)

    @property
    def _scaled(self) -> bool:
        return isinstance(self.policy.distribution, Point) and self.policy.distribution.scaled

    def _features(self, ops: Operations, observations: Array) -> Array:
        x = ops.features(observations)
        if self.policy.observation_dtype == "|u1":
            x = ops.apply("Div", x, ops.number(255.0))
        if self.policy.normalise:
            x = ops.apply("Sub", x, ops.tensor("observation.mean"))
            x = ops.apply("Mul", x, ops.tensor("observation.scale"))
            x = _between(ops, x, ops.number(-CLIP), ops.number(CLIP))
        return x

    def _dueling(self, ops: Operations, x: Array) -> Array:
        activation = self.policy.activation
        for at in range(len(self.policy.hidden) - 1):
            x = _activate(ops, activation, _linear(ops, x, f"layers.{at}"))
        value, advantage = (
            _linear(ops, _activate(ops, activation, _linear(ops, x, f"{stream}.0")), f"{stream}.1")
            for stream in ("value", "advantage")
        )
        return ops.apply("Sub", ops.apply("Add", value, advantage), ops.mean(advantage))

    def _recurrent(self, ops: Operations, x: Array, memory: Array) -> tuple[Array, Array]:
        policy, start = self.policy, 0
        states = []
        for at, size in enumerate(policy.hidden):
            name = f"cells.{at}"
            before = ops.part(memory, start, start + size)
            start += size
            from_inputs = ops.linear(x, f"{name}.weight_ih", f"{name}.bias_ih")
            summed = ops.apply("Add", from_inputs, ops.linear(before, f"{name}.weight_hh", f"{name}.bias_hh"))
            if policy.memory == "elman":
                x = _activate(ops, policy.activation, summed)
                states.append(x)
            else:
                held = ops.part(memory, start, start + size)
                start += size
                enter, forget, new, leave = (ops.part(summed, part * size, (part + 1) * size) for part in range(4))
                kept = ops.apply("Mul", ops.apply("Sigmoid", forget), held)
                added = ops.apply("Mul", ops.apply("Sigmoid", enter), ops.apply("Tanh", new))
                held = ops.apply("Add", kept, added)
                x = ops.apply("Mul", ops.apply("Sigmoid", leave), _activate(ops, policy.activation, held))
                states += [x, held]
        return _activate(ops, policy.output, _linear(ops, x, "output")), ops.join(states)


def _linear(ops: Operations, x: Array, name: str) -> Array:
    return ops.linear(x, f"{name}.weight", f"{name}.bias")


def _activate(ops: Operations, name: str, x: Array) -> Array:
    return x if name == "identity" else ops.apply(name.capitalize(), x)


def _between(ops: Operations, x: Array, low: Array, high: Array) -> Array:
    return ops.apply("Min", ops.apply("Max", x, low), high)
