"""Policy files with known weights."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal.base import seeding
from shoal.policies.actions import Bins, Categorical, EpsilonGreedy, Gaussian, Point
from shoal.policies.networks import Recurrent
from shoal.policies.observations import Flattener
from shoal.policies.policy import Policy, SavedPolicy


def saved_policy(path: Path, distribution: Any, hidden: tuple[int, ...] = (4,), normalise: bool = True) -> SavedPolicy:
    policy = Policy((3,), "<f4", distribution, hidden, normalise=normalise)
    weights = {
        "params": policy.init(seeding.rng(9, "weights")) + np.float32(0.1),
        "mean": np.full(3, 0.5, np.float32),
        "scale": np.full(3, 2.0, np.float32),
    }
    saved = SavedPolicy(policy, weights, {"id": "Walk-v0"})
    path.write_bytes(saved.to_bytes())
    return saved


def random_policy(policy: Policy, seed: int = 3) -> SavedPolicy:
    """Give a policy weights that matter: actions are not near ties, and some features are clipped."""
    rng = np.random.default_rng(seed)
    weights = {
        "params": rng.normal(scale=0.6, size=policy.count).astype(np.float32),
        "mean": rng.normal(size=policy.inputs).astype(np.float32),
        "scale": rng.uniform(0.5, 9.0, policy.inputs).astype(np.float32),
    }
    return SavedPolicy(policy, weights, {"id": "Walk-v0"})


def observations_for(policy: Policy, count: int, seed: int = 4) -> np.ndarray:
    """Draw observations (count, *shape) of a policy's dtype."""
    dtype = np.dtype(policy.observation_dtype)
    rng, shape = np.random.default_rng(seed), (count, *policy.observation_shape)
    if dtype.kind == "f":
        return (2 * rng.normal(size=shape)).astype(dtype)
    return rng.integers(0, 2 if dtype.kind == "b" else 120, shape).astype(dtype)


def outputs(saved: SavedPolicy, observations: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Compute distribution parameters as a worker does; updates the memory in place."""
    policy, weights = saved.policy, saved.weights
    features = policy.features(observations, weights["mean"], weights["scale"])
    network, params = policy.network, weights["params"]
    if isinstance(network, Recurrent):
        return network.step(network.layers(params), features, memory)
    return policy.out(params, features)[:, : policy.distribution.outputs - policy.distribution.free]


def unflattened(saved: SavedPolicy) -> SavedPolicy:
    """Make the policy that takes flattened observations, as exported policies do."""
    return dataclasses.replace(saved, policy=dataclasses.replace(saved.policy, flattened=None))


_ONE = Categorical((3,), (0,), scalar=True)
_FROM_FIVE = Categorical((4,), (5,), scalar=True)
_MULTI = Categorical((2, 3, 4), (0, 1, -2), scalar=False)
_VALUES = EpsilonGreedy((5,), (2,), scalar=True)
_NORMAL = Gaussian((2,), (-0.5, -math.inf), (0.7, math.inf), "<f4")
_MATRIX = Gaussian((2, 2), (-1.0,) * 4, (1.0, 0.5, 2.0, 0.1), "<f8")
_POINT = Point((2,), (-1.0, -2.0), (1.0, 2.0), "<f4")
_SCALED = Point((), (-3.0,), (5.0,), "<f8", scaled=True)
_BINS = Bins((5, 5), (0, 0), False, (1, 2), (-1.0, -2.0), (1.0, 4.0), "<f4")
_FLATTENED = Flattener(
    spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(3)}),
).to_record()

KINDS = {
    "logits": Policy((4,), "<f4", _ONE, (16, 16), normalise=True),
    "start": Policy((4,), "<f4", _FROM_FIVE, (8,), "relu"),
    "linear": Policy((3,), "<f4", _MULTI, (), "tanh", normalise=True),
    "multi": Policy((2, 3), "<i8", _MULTI, (8, 8), "sigmoid", normalise=True),
    "one number": Policy((), "<f4", _ONE, (8,)),
    "booleans": Policy((6,), "|b1", _ONE, (8,)),
    "halves": Policy((6,), "<f2", _ONE, (8,), normalise=True),
    "normal": Policy((3,), "<f4", _NORMAL, (16, 16), normalise=True),
    "matrix": Policy((2, 3, 4), "|u1", _MATRIX, (16,), "relu"),
    "normalised bytes": Policy((6,), "|u1", _NORMAL, (16,), "relu", normalise=True),
    "point": Policy((3,), "<f4", _POINT, (8, 4), "identity"),
    "scaled": Policy((3,), "<f4", _SCALED, (8,), "softsign", output="tanh"),
    "bins": Policy((3,), "<f4", _BINS, (8,)),
    "Q-values": Policy((4,), "<f4", _VALUES, (16,), "relu"),
    "dueling": Policy((4,), "<f4", _VALUES, (16, 12, 8), "relu", dueling=True),
    "dueling without shared layers": Policy((4,), "<f4", _VALUES, (16,), "tanh", dueling=True),
    "elman": Policy((3,), "<f4", _BINS, (6, 4), "tanh", normalise=True, memory="elman"),
    "elman softsign": Policy((3,), "<f4", _SCALED, (6,), "softsign", memory="elman", output="softsign"),
    "lstm": Policy((3,), "<f4", _ONE, (6, 4), "tanh", memory="lstm"),
    "lstm sigmoid": Policy((4,), "|u1", _POINT, (5,), "sigmoid", memory="lstm", output="tanh"),
    "flattened": Policy((5,), "<f4", _ONE, (8,), flattened=_FLATTENED),
}
"""Policies with every network, distribution, activation and kind of observation."""
