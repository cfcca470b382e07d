"""Start from a saved policy: its weights and observation statistics, if they fit the policy to be learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.base import seeding
from shoal.base.moments import Moments
from shoal.errors import UsageError
from shoal.policies.policy import Policy, SavedPolicy, Weights

_STARTED = 100_000  # a saved policy does not record its number of observations, so its statistics count as this many
_EQUAL = ("observation_shape", "hidden", "activation", "memory", "output", "dueling", "normalise")


def load_start(path: str | None) -> SavedPolicy | None:
    """Load the policy to start from, if one is given."""
    return None if path is None else SavedPolicy.load(Path(path))


def first_weights(policy: Policy, saved: SavedPolicy | None, seed: int, log_std: float = 0.0) -> Weights:
    """Return the weights to start from: new ones, or those of a saved policy.

    Standard deviations of actions, which some algorithms learn, begin at `log_std` if the saved policy has none.
    """
    params = policy.init(seeding.rng(seed, "weights"), log_std)
    if saved is None:
        mean, scale = np.zeros(policy.inputs, np.float32), np.ones(policy.inputs, np.float32)
        return {"params": params, "mean": mean, "scale": scale}
    differs = [
        f"{name.replace('_', ' ')} {_words(getattr(saved.policy, name))} there, {_words(getattr(policy, name))} here"
        for name in _EQUAL
        if getattr(saved.policy, name) != getattr(policy, name)
    ]
    count = policy.network.count
    if saved.policy.network.count != count and not differs:
        differs = [f"actions: {saved.policy.distribution} there, {policy.distribution} here"]
    if differs:
        raise UsageError(
            f"the policy of --from does not fit: {'; '.join(differs)}. Use the settings that it was learned with"
        )
    known = saved.weights["params"]
    params[:count] = known[:count]
    if len(known) == len(params):
        params[count:] = known[count:]
    return {"params": params, "mean": saved.weights["mean"], "scale": saved.weights["scale"]}


def first_moments(policy: Policy, saved: SavedPolicy | None) -> Moments:
    """Return the observation statistics to start from: none, or those of a saved policy."""
    if saved is None or not policy.normalise:
        return Moments.empty(policy.inputs)
    mean, scale = (saved.weights[name].astype(np.float64) for name in ("mean", "scale"))
    variance = np.maximum(scale**-2 - 1e-8, 0.0)
    return Moments(_STARTED, mean, variance * _STARTED)


def _words(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
