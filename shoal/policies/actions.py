"""Action distributions: how a network's output turns into actions, one class per kind of action space.

`out` is one array (..., `outputs`) with all parameters of the distribution, so that ratios, divergences and Fisher
products look the same for every distribution. It consists of the network's outputs and of `free` parameters that do not
depend on the observation. Workers use `noise`, `sample` and `to_env`; the rest is written over the array namespace.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, cast

import numpy as np

from shoal.base.arrays import Array
from shoal.errors import UsageError

if TYPE_CHECKING:
    import gymnasium


@dataclass(frozen=True)
class Categorical:
    """Discrete and MultiDiscrete spaces: independent choices with `choices[i]` options each, logits concatenated."""

    choices: tuple[int, ...]
    start: tuple[int, ...]
    scalar: bool
    """Whether the environment takes a single int (Discrete)."""

    kind: ClassVar[str] = "categorical"

    @property
    def outputs(self) -> int:
        """Number of distribution parameters: the last dimension of `out`."""
        return sum(self.choices)

    @property
    def free(self) -> int:
        """Number of distribution parameters that are learned directly, not computed by the network."""
        return 0

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action in a batch."""
        return (len(self.choices),)

    action_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int32)

    def noise(self, rng: np.random.Generator, steps: int, width: int) -> np.ndarray:
        """Draw Gumbel noise (steps, width, outputs): the argmax of logits plus noise is a sample."""
        uniform = rng.random((steps, width, self.outputs), dtype=np.float32)
        tiny = np.finfo(np.float32).tiny
        noise: np.ndarray = -np.log(-np.log(uniform + tiny) + tiny)
        return noise

    def sample(self, logits: np.ndarray, free: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Sample actions (width, choices) with `noise`, or take the most likely ones if it is None."""
        scores: np.ndarray = logits if noise is None else logits + noise
        if len(self.choices) == 1:
            only: np.ndarray = scores.argmax(axis=-1)[:, None]
            return only
        return np.stack([part.argmax(axis=-1) for part in self._split(scores)], axis=-1)

    def to_env(self, actions: np.ndarray) -> list[Any]:
        """Convert actions (width, ...) to the arguments of `env.step`, one per slot."""
        if self.scalar:
            # NumPy integers, as `action_space.sample()` returns them: Gymnasium checks those faster than Python's.
            column = actions[:, 0].astype(np.int64, copy=False)
            return list(column + self.start[0] if self.start[0] else column)
        return list(actions.astype(np.int64) + np.asarray(self.start))

    def log_prob(self, out: Array, actions: Array) -> Array:
        """Compute the log-probability (...) of actions (..., choices)."""
        xp = out.__array_namespace__()
        total = 0.0
        for index, part in enumerate(self._split(out)):
            chosen = xp.take_along_axis(_log_softmax(part), actions[..., index : index + 1].astype(xp.int32), axis=-1)
            total = total + chosen[..., 0]
        return total

    def entropy(self, out: Array) -> Array:
        """Compute the entropy (...)."""
        return sum(-(_exp(logs) * logs).sum(axis=-1) for logs in map(_log_softmax, self._split(out)))

    def kl(self, old: Array, new: Array) -> Array:
        """Compute the divergence KL(old || new) (...)."""
        pairs = zip(map(_log_softmax, self._split(old)), map(_log_softmax, self._split(new)), strict=True)
        return sum((_exp(a) * (a - b)).sum(axis=-1) for a, b in pairs)

    def fisher(self, out: Array, tangent: Array) -> Array:
        """Multiply the Fisher matrix of the distribution with a tangent of `out` (..., outputs)."""
        xp = out.__array_namespace__()
        parts = []
        for logits, change in zip(self._split(out), self._split(tangent), strict=True):
            p = _exp(_log_softmax(logits))
            parts.append(p * (change - (p * change).sum(axis=-1, keepdims=True)))
        return xp.concatenate(parts, axis=-1)

    def _split(self, out: Array) -> list[Array]:
        ends = list(itertools.accumulate(self.choices))
        return [out[..., end - size : end] for end, size in zip(ends, self.choices, strict=True)]


@dataclass(frozen=True)
class EpsilonGreedy(Categorical):
    """One Discrete choice by Q-value: `out` holds the Q-values; with probability epsilon the action is random.

    Log-probabilities, entropy and divergences are those of the softmax of the Q-values.
    """

    kind: ClassVar[str] = "epsilon-greedy"

    def noise(self, rng: np.random.Generator, steps: int, width: int) -> np.ndarray:
        """Draw uniform noise (steps, width, 2): whether to explore, and which action to take then."""
        return rng.random((steps, width, 2), dtype=np.float32)

    def sample(self, values: np.ndarray, epsilon: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Take greedy actions (width, 1), or with `noise` random ones at rate `epsilon` (width,) or (1,)."""
        best: np.ndarray = values.argmax(axis=-1)
        if noise is not None:
            best = np.where(noise[:, 0] < epsilon, (noise[:, 1] * self.outputs).astype(np.int64), best)
        return best[:, None]


@dataclass(frozen=True)
class Bins(Categorical):
    """A discretised Box space: component i takes one of `choices[i]` values, evenly spaced between its bounds."""

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    dtype: str

    kind: ClassVar[str] = "bins"

    def to_env(self, actions: np.ndarray) -> list[Any]:
        """Convert actions (width, ...) to the arguments of `env.step`, one per slot."""
        numbers = self.values[np.arange(len(self.choices)), actions]
        return list(numbers.reshape(-1, *self.shape))

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The values (components, choices) that the environment gets, in its dtype."""
        values = np.linspace(self.low, self.high, self.choices[0], axis=-1)
        return values.astype(self.dtype)


@dataclass(frozen=True)
class Gaussian:
    """Box spaces: an independent normal per component, clipped to the bounds only on the way to the environment.

    `out` is the mean followed by the log standard deviation, which does not depend on the observation.
    """

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    dtype: str

    kind: ClassVar[str] = "gaussian"

    @property
    def free(self) -> int:
        """Number of log standard deviations: one per component."""
        return math.prod(self.shape)

    @property
    def outputs(self) -> int:
        """Number of distribution parameters: the last dimension of `out`."""
        return 2 * self.free

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action in a batch: flat."""
        return (self.free,)

    action_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    def noise(self, rng: np.random.Generator, steps: int, width: int) -> np.ndarray:
        """Draw standard normal noise (steps, width, components)."""
        return rng.standard_normal((steps, width, self.free), dtype=np.float32)

    def sample(self, mean: np.ndarray, free: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Sample actions (width, components) with `noise`, or take the mean if it is None."""
        return mean if noise is None else mean + np.exp(free) * noise

    def to_env(self, actions: np.ndarray) -> list[Any]:
        """Convert actions (width, ...) to the arguments of `env.step`, one per slot."""
        low, high = self.bounds
        cut = np.minimum(np.maximum(actions, low), high)  # `clip` takes twice as long with cold caches
        if cut.dtype != self._dtype:
            cut = cut.astype(self._dtype)
        return list(cut if len(self.shape) == 1 else cut.reshape(-1, *self.shape))

    @functools.cached_property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @functools.cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds (components,) float32."""
        return np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)

    def log_prob(self, out: Array, actions: Array) -> Array:
        """Compute the log-density (...) of actions (..., components)."""
        mean, log_std = self._split(out)
        z = (actions - mean) / _exp(log_std)
        return (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(axis=-1)

    def entropy(self, out: Array) -> Array:
        """Compute the entropy (...)."""
        return (self._split(out)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(axis=-1)

    def kl(self, old: Array, new: Array) -> Array:
        """Compute the divergence KL(old || new) (...)."""
        mean, log_std = self._split(old)
        new_mean, new_log_std = self._split(new)
        spread = _exp(2 * (log_std - new_log_std))
        shift = ((mean - new_mean) / _exp(new_log_std)) ** 2
        return (new_log_std - log_std + 0.5 * (spread + shift - 1)).sum(axis=-1)

    def fisher(self, out: Array, tangent: Array) -> Array:
        """Multiply the Fisher matrix of the distribution with a tangent of `out` (..., outputs)."""
        xp = out.__array_namespace__()
        _, log_std = self._split(out)
        of_mean, of_log_std = self._split(tangent)
        return xp.concatenate([of_mean / _exp(2 * log_std), 2 * of_log_std], axis=-1)

    def _split(self, out: Array) -> tuple[Array, Array]:
        return out[..., : self.free], out[..., self.free :]


@dataclass(frozen=True)
class Point(Gaussian):
    """Box spaces without randomness: the network's output is the action. For searches, which need no densities."""

    scaled: bool = False
    """Whether outputs in -1..1 (tanh, softsign) are scaled to the bounds; otherwise they are only clipped."""

    kind: ClassVar[str] = "point"

    @property
    def free(self) -> int:
        """Number of free parameters: none, because nothing is random."""
        return 0

    @property
    def outputs(self) -> int:
        """Number of distribution parameters: the last dimension of `out`."""
        return math.prod(self.shape)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action in a batch: flat."""
        return (self.outputs,)

    def sample(self, mean: np.ndarray, free: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Return the network's outputs (width, components); the noise is not used."""
        return mean

    def to_env(self, actions: np.ndarray) -> list[Any]:
        """Convert actions (width, ...) to the arguments of `env.step`, one per slot."""
        if self.scaled:
            low, high = self.bounds
            actions = low + (high - low) * (0.5 * actions + 0.5)
        return super().to_env(actions)


Distribution = Categorical | Gaussian


class DistributionRecord(TypedDict):
    """A distribution as plain data: its `kind` and the fields of its class, with lists for tuples."""

    kind: str


def distribution_for(space: gymnasium.Space[Any]) -> Distribution:
    """Choose the distribution for an action space; refuse unsupported spaces."""
    from gymnasium import spaces  # here, because programs that only act with a policy do not need it

    if isinstance(space, spaces.Discrete):
        return Categorical((int(space.n),), (int(space.start),), scalar=True)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return Categorical(tuple(space.nvec.tolist()), tuple(space.start.tolist()), scalar=False)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(np.ravel(bound).astype(float).tolist()) for bound in (space.low, space.high))
        return Gaussian(tuple(space.shape), low, high, np.dtype(space.dtype).str)
    raise UsageError(
        f"the action space {space} is not supported. Shoal supports Discrete, MultiDiscrete (one row) and Box spaces "
        f"of floats; wrap the environment so that its action space is one of these"
    )


def to_record(distribution: Distribution) -> DistributionRecord:
    """Convert a distribution to plain data, for the wire and for files."""
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(distribution).items()
    }
    return cast(DistributionRecord, {"kind": distribution.kind} | fields)


def from_record(record: DistributionRecord) -> Distribution:
    """Rebuild a distribution from `to_record`."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    distribution: Distribution = _KINDS[record["kind"]](**{name: fields[name] for name in fields if name != "kind"})
    return distribution


_KINDS: dict[str, Any] = {kind.kind: kind for kind in (Categorical, EpsilonGreedy, Bins, Gaussian, Point)}


def _log_softmax(logits: Array) -> Array:
    xp = logits.__array_namespace__()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


def _exp(x: Array) -> Array:
    return x.__array_namespace__().exp(x)
