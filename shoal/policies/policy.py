"""A policy: from an observation to features, through a network, to an action distribution.

`Policy` is the fixed part and plain data. The learned part, `Weights`, is stored and shipped separately. Stacked
`params` (width, count) give each slot of a lane its own parameters.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from shoal.base.arrays import Array
from shoal.errors import CheckpointFault
from shoal.policies import actions
from shoal.policies.actions import Distribution, DistributionRecord
from shoal.policies.networks import MLP, Dueling, Recurrent

if TYPE_CHECKING:
    from shoal.policies.observations import SpaceRecord

FORMAT = "shoal-policy-1"
"""Marks the policy files of runs."""

EXPORT_FORMAT = "shoal-export-1"
"""Marks exported policies, which other programs read."""

Actor = Callable[[np.ndarray, np.ndarray | None, np.ndarray], np.ndarray]
"""(observations (width, *shape), noise or None, memory (width, remembered)) -> actions (width, components)."""

CLIP = 10.0
"""Normalised observations are clipped to this many standard deviations."""


class Statistics(TypedDict):
    """Normalisation of observations."""

    mean: np.ndarray
    """(inputs,) float32."""
    scale: np.ndarray
    """(inputs,) float32: 1 / standard deviation."""


class Weights(Statistics):
    """Everything learned that acting needs."""

    params: np.ndarray
    """(count,) float32, or (width, count) with one set of parameters per slot."""
    epsilon: NotRequired[np.ndarray]
    """(lanes, width) float32: exploration rate of each slot, for Q-values; a single row or column holds for all."""


class Spaces(TypedDict):
    """What the head has to know about an environment."""

    shape: list[int]
    """Shape of one observation."""
    dtype: str
    """Type of observations as records keep them."""
    distribution: DistributionRecord
    """The distribution that fits the action space."""
    flattened: NotRequired[SpaceRecord]
    """The observation space, if its observations are no arrays and therefore flattened."""


class PolicyRecord(TypedDict):
    """A `Policy` as plain data, as workers and policy files receive it."""

    observation_shape: list[int]
    observation_dtype: str
    distribution: DistributionRecord
    hidden: list[int]
    activation: str
    normalise: bool
    dueling: bool
    memory: str
    output: str
    flattened: NotRequired[SpaceRecord]


@dataclass(frozen=True)
class Policy:
    """How to act in one environment, without the learned weights."""

    observation_shape: tuple[int, ...]
    observation_dtype: str
    distribution: Distribution
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    normalise: bool = False
    """Whether observations are shifted and scaled by running statistics."""
    dueling: bool = False
    """Whether the network has separate state-value and advantage streams."""
    memory: str = "none"
    """Recurrence of the hidden layers: "none", "elman" or "lstm"."""
    output: str = "identity"
    """Activation of the output layer."""
    flattened: SpaceRecord | None = field(default=None, hash=False)
    """The observation space, if its observations are no arrays and therefore flattened."""

    @staticmethod
    def fitting(
        spaces: Spaces, distribution: Distribution | None = None, *, hidden: Sequence[int] = (64, 64), **options: Any
    ) -> Policy:
        """Make the policy that fits the spaces of an environment; `options` are the other fields."""
        found = actions.from_record(spaces["distribution"]) if distribution is None else distribution
        space = spaces.get("flattened")
        return Policy(tuple(spaces["shape"]), spaces["dtype"], found, tuple(hidden), flattened=space, **options)

    @functools.cached_property
    def inputs(self) -> int:
        """Number of features."""
        return math.prod(self.observation_shape)

    @functools.cached_property
    def network(self) -> MLP | Dueling:
        """The network from features to the distribution parameters that depend on the observation."""
        sizes = (self.inputs, *self.hidden, self.distribution.outputs - self.distribution.free)
        if self.dueling:
            return Dueling(sizes, self.activation)
        if self.memory != "none":
            return Recurrent(sizes, self.activation, self.output, self.memory)
        return MLP(sizes, self.activation, self.output)

    @property
    def remembered(self) -> int:
        """Size of the recurrent state of one slot."""
        return self.network.remembered if isinstance(self.network, Recurrent) else 0

    @functools.cached_property
    def count(self) -> int:
        """Number of parameters."""
        return self.network.count + self.distribution.free

    def init(self, rng: np.random.Generator, log_std: float = 0.0) -> np.ndarray:
        """Initialise the flat parameters: near-uniform choices, or a normal around zero with this log deviation."""
        free = np.full(self.distribution.free, log_std, np.float32)
        return np.concatenate([self.network.init(rng, out_scale=0.01), free])

    def features(self, observations: Array, mean: Array, scale: Array) -> Array:
        """Compute network inputs (..., inputs) float32 from observations (..., *shape)."""
        x = self.flatten(observations)
        if not self.normalise:
            return x
        xp = x.__array_namespace__()
        x = x - mean
        x *= scale
        return xp.minimum(xp.maximum(x, -CLIP), CLIP)

    def flatten(self, observations: Array) -> Array:
        """Flatten observations to rows (..., inputs) of float32; bytes are scaled to 0..1."""
        if observations.dtype == np.float32 and len(self.observation_shape) == 1:
            return observations
        lead = observations.shape[: observations.ndim - len(self.observation_shape)]
        x = observations.reshape(*lead, self.inputs).astype("float32", copy=False)
        return x / 255.0 if self.observation_dtype == "|u1" else x

    def out(self, params: Array, features: Array) -> Array:
        """Compute distribution parameters (..., outputs)."""
        computed = self.network(params, features)
        free = self.distribution.free
        if not free:
            return computed
        xp = computed.__array_namespace__()
        return xp.concatenate([computed, xp.broadcast_to(params[-free:], (*computed.shape[:-1], free))], axis=-1)

    def actor(self, weights: Weights, lane: int = 0) -> Actor:
        """Build the function by which a worker acts with these weights."""
        params, mean, scale = weights["params"], weights["mean"], weights["scale"]
        distribution = self.distribution
        compute, free = self._forward(params), params[..., params.shape[-1] - distribution.free :]
        if "epsilon" in weights:
            free = weights["epsilon"][lane % len(weights["epsilon"])]

        def act(observations: np.ndarray, noise: np.ndarray | None, memory: np.ndarray) -> np.ndarray:
            return distribution.sample(compute(self.features(observations, mean, scale), memory), free, noise)

        return act

    def _forward(self, params: np.ndarray) -> Callable[[np.ndarray, np.ndarray], Any]:
        """Build the forward pass: features (width, inputs), memory (width, remembered) -> outputs (width, ...)."""
        network, stacked = self.network, params.ndim == 2
        if isinstance(network, Recurrent):
            cells = network.layers(params)
            if stacked:
                return lambda x, memory: network.step(cells, x[:, None], memory[:, None])[:, 0]
            return lambda x, memory: network.step(cells, x, memory)
        if stacked and isinstance(network, MLP):
            by_row = network.by_row(params)
            return lambda x, memory: by_row(x)
        layers = network.layers(params)
        return lambda x, memory: network.apply(layers, x)

    def to_record(self) -> PolicyRecord:
        """Convert to plain data, for the wire and for files."""
        record: PolicyRecord = {
            "observation_shape": list(self.observation_shape),
            "observation_dtype": self.observation_dtype,
            "distribution": actions.to_record(self.distribution),
            "hidden": list(self.hidden),
            "activation": self.activation,
            "normalise": self.normalise,
            "dueling": self.dueling,
            "memory": self.memory,
            "output": self.output,
        }
        if self.flattened is not None:
            record["flattened"] = self.flattened
        return record

    @staticmethod
    def from_record(record: PolicyRecord) -> Policy:
        """Rebuild a policy from `to_record`."""
        return Policy(
            tuple(record["observation_shape"]),
            record["observation_dtype"],
            actions.from_record(record["distribution"]),
            tuple(record["hidden"]),
            record["activation"],
            record["normalise"],
            record["dueling"],
            record["memory"],
            record["output"],
            record.get("flattened"),
        )


@dataclass(frozen=True)
class SavedPolicy:
    """The content of a policy file: everything needed to act."""

    policy: Policy
    weights: Weights
    env: Mapping[str, Any]
    """The environment it was learned in: an `EnvSpec` as plain data."""

    def to_bytes(self) -> bytes:
        """Serialise to the content of a policy file."""
        header = {
            "format": FORMAT,
            "policy": json.dumps(self.policy.to_record()),
            "env": json.dumps(dict(self.env)),
        }
        arrays: Any = self.weights
        return safetensors.numpy.save(arrays, metadata=header)

    @staticmethod
    def load(path: Path) -> SavedPolicy:
        """Read a policy file."""
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
                if header.get("format") == EXPORT_FORMAT:
                    raise ValueError("it is an export for other programs. Load the run that it was exported from")
                weights: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return SavedPolicy(_read_policy(header["policy"]), weights, json.loads(header["env"]))
        except FileNotFoundError:
            raise CheckpointFault(
                f"there is no policy file {path}. A run writes it with its first checkpoint"
            ) from None
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointFault(f"the policy file {path} cannot be read: {error}") from None


def _read_policy(text: str) -> Policy:
    """Parse the policy of a file. The first files called the distribution `head` and had fewer kinds of networks."""
    record = {"dueling": False, "memory": "none", "output": "identity"} | json.loads(text)
    if "head" in record:
        record["distribution"] = record.pop("head")
    return Policy.from_record(record)
