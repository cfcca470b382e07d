"""A policy: what an observation turns into before a network sees it, the network, and the action head.

`Policy` is the fixed part, plain data. What is learned travels beside it as a tree, `weights`:
`params` (flat), `mean` and `scale` (1 / standard deviation) of the observations. They are saved and loaded together.
`params` may be stacked (width, count): then each slot of a lane acts with parameters of its own.
Where actions are chosen by value, `epsilon` (lanes, width) is there too: how often each slot tries something else;
one row or column stands for all lanes or slots.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from shoal.base.trees import Tree
from shoal.errors import CheckpointFault
from shoal.policies import actions
from shoal.policies.actions import Head
from shoal.policies.networks import MLP, Dueling, Recurrent

Actor = Callable[[np.ndarray, np.ndarray | None, np.ndarray], np.ndarray]
"""(observations (width, *shape), noise or None, memory (width, remembered)) to actions (width, numbers)."""

CLIP = 10.0
"""Normalised observations are cut to this many standard deviations."""


@dataclass(frozen=True)
class Policy:
    """How to act in one environment, without the learned numbers."""

    observation_shape: tuple[int, ...]
    observation_dtype: str
    head: Head
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    normalise: bool = False
    """Whether observations are shifted and scaled by running statistics."""
    dueling: bool = False
    """Whether the network computes a value and advantages apart, and adds them up."""
    memory: str = "none"
    """Whether hidden layers remember what they computed before: "elman" or "lstm"."""
    output: str = "identity"
    """Activation of the outputs."""

    @functools.cached_property
    def inputs(self) -> int:
        """Numbers in one observation."""
        return math.prod(self.observation_shape)

    @functools.cached_property
    def network(self) -> MLP | Dueling:
        """From features to what of `out` depends on the observation."""
        sizes = (self.inputs, *self.hidden, self.head.outputs - self.head.free)
        if self.dueling:
            return Dueling(sizes, self.activation)
        if self.memory != "none":
            return Recurrent(sizes, self.activation, self.output, self.memory)
        return MLP(sizes, self.activation, self.output)

    @property
    def remembered(self) -> int:
        """Numbers that a slot remembers from step to step of an episode."""
        return self.network.remembered if isinstance(self.network, Recurrent) else 0

    @functools.cached_property
    def count(self) -> int:
        """How many parameters."""
        return self.network.count + self.head.free

    def init(self, rng: np.random.Generator, log_std: float = 0.0) -> np.ndarray:
        """Flat parameters of a new policy: near-uniform over choices; around zero, that wide, for numbers."""
        free = np.full(self.head.free, log_std, np.float32)
        return np.concatenate([self.network.init(rng, out_scale=0.01), free])

    def features(self, observations: Any, mean: Any, scale: Any) -> Any:
        """Network inputs (..., inputs) float32 from observations (..., *shape)."""
        x = self.numbers(observations)
        if not self.normalise:
            return x
        xp = x.__array_namespace__()
        x = x - mean
        x *= scale
        return xp.minimum(xp.maximum(x, -CLIP), CLIP)

    def numbers(self, observations: Any) -> Any:
        """Observations as rows of float32 (..., inputs); bytes are scaled to 0..1."""
        if observations.dtype == np.float32 and len(self.observation_shape) == 1:
            return observations
        lead = observations.shape[: observations.ndim - len(self.observation_shape)]
        x = observations.reshape(*lead, self.inputs).astype("float32", copy=False)
        return x / 255.0 if self.observation_dtype == "|u1" else x

    def out(self, params: Any, features: Any) -> Any:
        """Distribution parameters (..., outputs)."""
        computed = self.network(params, features)
        if not self.head.free:
            return computed
        xp = computed.__array_namespace__()
        free = xp.broadcast_to(params[-self.head.free :], (*computed.shape[:-1], self.head.free))
        return xp.concatenate([computed, free], axis=-1)

    def actor(self, weights: Tree, lane: int = 0) -> Actor:
        """For a worker: how to act with these weights."""
        params, mean, scale = weights["params"], weights["mean"], weights["scale"]
        head = self.head
        compute, free = self._compute(params), params[..., params.shape[-1] - head.free :]
        if "epsilon" in weights:
            free = weights["epsilon"][lane % len(weights["epsilon"])]

        def act(observations: np.ndarray, noise: np.ndarray | None, memory: np.ndarray) -> np.ndarray:
            return head.sample(compute(self.features(observations, mean, scale), memory), free, noise)

        return act

    def _compute(self, params: np.ndarray) -> Callable[[np.ndarray, np.ndarray], Any]:
        """Outputs (width, ...) of the network from features (width, inputs) and memory (width, remembered)."""
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

    def to_tree(self) -> Tree:
        """Plain data, for the wire and for files."""
        return {
            "observation_shape": list(self.observation_shape),
            "observation_dtype": self.observation_dtype,
            "head": actions.to_tree(self.head),
            "hidden": list(self.hidden),
            "activation": self.activation,
            "normalise": self.normalise,
            "dueling": self.dueling,
            "memory": self.memory,
            "output": self.output,
        }

    @staticmethod
    def from_tree(tree: Tree) -> Policy:
        """The inverse of `to_tree`."""
        return Policy(
            tuple(tree["observation_shape"]),
            tree["observation_dtype"],
            actions.from_tree(tree["head"]),
            tuple(tree["hidden"]),
            tree["activation"],
            tree["normalise"],
            tree.get("dueling", False),
            tree.get("memory", "none"),
            tree.get("output", "identity"),
        )


@dataclass(frozen=True)
class SavedPolicy:
    """A policy file's content: enough to act again, anywhere."""

    policy: Policy
    weights: Tree
    env: Mapping[str, Any]

    def metadata(self) -> dict[str, str]:
        """What goes into the file's header."""
        return {
            "format": "shoal-policy-1",
            "policy": json.dumps(self.policy.to_tree()),
            "env": json.dumps(self.env),
        }

    @staticmethod
    def load(path: Path) -> SavedPolicy:
        """Read a policy file."""
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return SavedPolicy(Policy.from_tree(json.loads(header["policy"])), weights, json.loads(header["env"]))
        except FileNotFoundError:
            raise CheckpointFault(f"there is no policy at {path}. A run writes one with its first checkpoint") from None
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointFault(f"the policy file {path} cannot be read: {error}") from None
