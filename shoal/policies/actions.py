"""Action heads: what a network's output means as a distribution over actions.

One class for each kind of action space. `out` is always one array (..., `outputs`) that holds all parameters of the
distribution, so that ratios, divergences and Fisher products look the same for every head. It is made of what the
network computes and `free` parameters that do not depend on the observation. `noise`, `sample` and `to_env` are for
workers; the rest is written over the array namespace.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np

from shoal.errors import UsageError


@dataclass(frozen=True)
class Categorical:
    """Discrete and MultiDiscrete spaces: independent choices with `choices[i]` options each, as logits side by side."""

    choices: tuple[int, ...]
    start: tuple[int, ...]
    scalar: bool
    """Whether the environment takes one plain int."""

    kind: ClassVar[str] = "categorical"

    @property
    def outputs(self) -> int:
        """Width of `out`."""
        return sum(self.choices)

    @property
    def free(self) -> int:
        """Parameters of the distribution that no network computes."""
        return 0

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action as the learner sees it."""
        return (len(self.choices),)

    action_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int32)

    def noise(self, rng: np.random.Generator, steps: int, width: int) -> np.ndarray:
        """Gumbel noise (steps, width, outputs): adding it to logits and taking the maximum draws a sample."""
        uniform = rng.random((steps, width, self.outputs), dtype=np.float32)
        tiny = np.finfo(np.float32).tiny
        noise: np.ndarray = -np.log(-np.log(uniform + tiny) + tiny)
        return noise

    def sample(self, logits: np.ndarray, free: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Actions (width, choices), drawn with `noise` or the likeliest when it is None."""
        scores: np.ndarray = logits if noise is None else logits + noise
        if len(self.choices) == 1:
            only: np.ndarray = scores.argmax(axis=-1)[:, None]
            return only
        return np.stack([part.argmax(axis=-1) for part in self._split(scores)], axis=-1)

    def to_env(self, actions: np.ndarray) -> list[Any]:
        """What `env.step` takes, for each row of actions."""
        if self.scalar:
            # NumPy integers, as `action_space.sample()` gives them: Gymnasium checks those faster than plain ones.
            column = actions[:, 0].astype(np.int64, copy=False)
            return list(column + self.start[0] if self.start[0] else column)
        return list(actions.astype(np.int64) + np.asarray(self.start))

    def log_prob(self, out: Any, actions: Any) -> Any:
        """Log-probability (...) of actions (..., choices)."""
        xp = out.__array_namespace__()
        total = 0.0
        for index, part in enumerate(self._split(out)):
            chosen = xp.take_along_axis(_log_softmax(part), actions[..., index : index + 1].astype(xp.int32), axis=-1)
            total = total + chosen[..., 0]
        return total

    def entropy(self, out: Any) -> Any:
        """Entropy (...)."""
        return sum(-(_exp(logs) * logs).sum(axis=-1) for logs in map(_log_softmax, self._split(out)))

    def kl(self, old: Any, new: Any) -> Any:
        """KL(old || new) (...)."""
        pairs = zip(map(_log_softmax, self._split(old)), map(_log_softmax, self._split(new)), strict=True)
        return sum((_exp(a) * (a - b)).sum(axis=-1) for a, b in pairs)

    def fisher(self, out: Any, tangent: Any) -> Any:
        """Fisher matrix of the distribution times a tangent of `out` (..., outputs)."""
        xp = out.__array_namespace__()
        parts = []
        for logits, change in zip(self._split(out), self._split(tangent), strict=True):
            p = _exp(_log_softmax(logits))
            parts.append(p * (change - (p * change).sum(axis=-1, keepdims=True)))
        return xp.concatenate(parts, axis=-1)

    def _split(self, out: Any) -> list[Any]:
        ends = list(itertools.accumulate(self.choices))
        return [out[..., end - size : end] for end, size in zip(ends, self.choices, strict=True)]


@dataclass(frozen=True)
class EpsilonGreedy(Categorical):
    """One Discrete choice by value: `out` is what each action is worth. The best is taken, but with a chance of epsilon
    any. As a distribution it counts as the softmax of the values."""

    kind: ClassVar[str] = "epsilon-greedy"

    def noise(self, rng: np.random.Generator, steps: int, width: int) -> np.ndarray:
        """Uniform noise (steps, width, 2): whether to try something, and what."""
        return rng.random((steps, width, 2), dtype=np.float32)

    def sample(self, values: np.ndarray, epsilon: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Actions (width, 1): the best, or with `noise` any where it says so. `epsilon` is (width,) or (1,)."""
        best: np.ndarray = values.argmax(axis=-1)
        if noise is not None:
            best = np.where(noise[:, 0] < epsilon, (noise[:, 1] * self.outputs).astype(np.int64), best)
        return best[:, None]


@dataclass(frozen=True)
class Bins(Categorical):
    """A Box space of few choices: each number is one of `choices[i]` values, evenly from its bound to the other."""

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    dtype: str

    kind: ClassVar[str] = "bins"

    def to_env(self, actions: np.ndarray) -> list[Any]:
        """What `env.step` takes, for each row of actions."""
        numbers = self._values[np.arange(len(self.choices)), actions]
        return list(numbers.reshape(-1, *self.shape))

    @functools.cached_property
    def _values(self) -> np.ndarray:
        values = np.linspace(self.low, self.high, self.choices[0], axis=-1)
        return values.astype(self.dtype)


@dataclass(frozen=True)
class Gaussian:
    """Box spaces: a normal for each number, cut to the bounds only when it reaches the environment.

    `out` is mean and log standard deviation side by side; the latter does not depend on the observation.
    """

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    dtype: str

    kind: ClassVar[str] = "gaussian"

    @property
    def free(self) -> int:
        """Log standard deviations, one for each number."""
        return math.prod(self.shape)

    @property
    def outputs(self) -> int:
        """Width of `out`."""
        return 2 * self.free

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action as the learner sees it: flat."""
        return (self.free,)

    action_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    def noise(self, rng: np.random.Generator, steps: int, width: int) -> np.ndarray:
        """Standard normal noise (steps, width, numbers)."""
        return rng.standard_normal((steps, width, self.free), dtype=np.float32)

    def sample(self, mean: np.ndarray, free: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Actions (width, numbers), drawn with `noise` or the mean when it is None."""
        return mean if noise is None else mean + np.exp(free) * noise

    def to_env(self, actions: np.ndarray) -> list[Any]:
        """What `env.step` takes, for each row of actions."""
        low, high = self._bounds
        cut = np.minimum(np.maximum(actions, low), high)  # `clip` takes twice as long where caches are cold, as here
        if cut.dtype != self._dtype:
            cut = cut.astype(self._dtype)
        return list(cut if len(self.shape) == 1 else cut.reshape(-1, *self.shape))

    @functools.cached_property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @functools.cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)

    def log_prob(self, out: Any, actions: Any) -> Any:
        """Log-density (...) of actions (..., numbers)."""
        mean, log_std = self._split(out)
        z = (actions - mean) / _exp(log_std)
        return (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(axis=-1)

    def entropy(self, out: Any) -> Any:
        """Entropy (...)."""
        return (self._split(out)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(axis=-1)

    def kl(self, old: Any, new: Any) -> Any:
        """KL(old || new) (...)."""
        mean, log_std = self._split(old)
        new_mean, new_log_std = self._split(new)
        spread = _exp(2 * (log_std - new_log_std))
        shift = ((mean - new_mean) / _exp(new_log_std)) ** 2
        return (new_log_std - log_std + 0.5 * (spread + shift - 1)).sum(axis=-1)

    def fisher(self, out: Any, tangent: Any) -> Any:
        """Fisher matrix of the distribution times a tangent of `out` (..., outputs)."""
        xp = out.__array_namespace__()
        _, log_std = self._split(out)
        of_mean, of_log_std = self._split(tangent)
        return xp.concatenate([of_mean / _exp(2 * log_std), 2 * of_log_std], axis=-1)

    def _split(self, out: Any) -> tuple[Any, Any]:
        return out[..., : self.free], out[..., self.free :]


@dataclass(frozen=True)
class Point(Gaussian):
    """Box spaces without chance: what the network computes is the action. Not a distribution, so for search only."""

    scaled: bool = False
    """Whether -1..1 stands for the bounds, as outputs of tanh do; otherwise outputs are only cut to the bounds."""

    kind: ClassVar[str] = "point"

    @property
    def free(self) -> int:
        """None."""
        return 0

    @property
    def outputs(self) -> int:
        """Width of `out`."""
        return math.prod(self.shape)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action: flat."""
        return (self.outputs,)

    def sample(self, mean: np.ndarray, free: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Actions (width, numbers): what was computed, whatever the noise."""
        return mean

    def to_env(self, actions: np.ndarray) -> list[Any]:
        """What `env.step` takes, for each row of actions."""
        if self.scaled:
            low, high = self._bounds
            actions = low + (high - low) * (0.5 * actions + 0.5)
        return super().to_env(actions)


Head = Categorical | Gaussian


def head_for(space: gymnasium.Space[Any]) -> Head:
    """The head for an action space; refuses those that no head covers."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Discrete):
        return Categorical((int(space.n),), (int(space.start),), scalar=True)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return Categorical(tuple(space.nvec.tolist()), tuple(space.start.tolist()), scalar=False)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(np.ravel(bound).astype(float).tolist()) for bound in (space.low, space.high))
        return Gaussian(tuple(space.shape), low, high, np.dtype(space.dtype).str)
    raise UsageError(
        f"the action space {space} is not supported. Shoal acts in Discrete, MultiDiscrete (one row) and Box spaces of "
        f"floats; wrap the environment so that its actions are one of these"
    )


def to_tree(head: Head) -> dict[str, Any]:
    """A head as plain data, for the wire and for files."""
    fields = dataclasses.asdict(head)
    return {"kind": head.kind} | {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}


def from_tree(tree: dict[str, Any]) -> Head:
    """The inverse of `to_tree`."""
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
    kinds: dict[Any, Any] = {kind.kind: kind for kind in (Categorical, EpsilonGreedy, Bins, Gaussian, Point)}
    head: Head = kinds[fields.pop("kind")](**fields)
    return head


def _log_softmax(logits: Any) -> Any:
    xp = logits.__array_namespace__()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


def _exp(x: Any) -> Any:
    return x.__array_namespace__().exp(x)
