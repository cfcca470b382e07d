"""How to use an exported policy, in words and as JSON: the metadata of every file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import shoal
from shoal.policies import actions
from shoal.policies.actions import Bins, Categorical, EpsilonGreedy, Point
from shoal.policies.policy import CLIP, EXPORT_FORMAT, Policy, SavedPolicy


def description(saved: SavedPolicy) -> dict[str, str]:
    """Describe how to use the tensors: strings, of which `observation`, `network` and `action` are JSON."""
    policy = saved.policy
    kind = "dueling" if policy.dueling else "mlp" if policy.memory == "none" else policy.memory
    observation = {
        "shape": policy.observation_shape,
        "dtype": np.dtype(policy.observation_dtype).name,
        "divide_by": 255 if policy.observation_dtype == "|u1" else 1,
        "normalise": policy.normalise,
        "clip": CLIP if policy.normalise else None,
        "flattened_from": policy.flattened,
    }
    network = {
        "kind": kind,
        "hidden": policy.hidden,
        "activation": policy.activation,
        "output_activation": policy.output,
        "memory": policy.remembered,
    }
    return {
        "format": EXPORT_FORMAT,
        "shoal": shoal.__version__,
        "environment": saved.env["id"],
        "observation": _json(observation),
        "network": _json(network),
        "action": _json({"space": _space_name(policy)} | actions.to_record(policy.distribution)),
        "output": _output_name(policy),
        "use": _instructions(policy),
    }


def _space_name(policy: Policy) -> str:
    distribution = policy.distribution
    if isinstance(distribution, Categorical) and not isinstance(distribution, Bins):
        return "Discrete" if distribution.scalar else "MultiDiscrete"
    return "Box"


def _output_name(policy: Policy) -> str:
    distribution = policy.distribution
    if isinstance(distribution, EpsilonGreedy):
        return "Q-values"
    if isinstance(distribution, Categorical):
        return "logits"
    return "action before scaling and clipping" if isinstance(distribution, Point) else "mean"


def _instructions(policy: Policy) -> str:
    """Say in words how to compute an action."""
    return "; ".join([*_from_observations(policy), *_through_layers(policy), _to_action(policy)])


def _from_observations(policy: Policy) -> list[str]:
    if policy.flattened is not None:
        steps = ["flatten the observation to one vector, as gymnasium.spaces.utils.flatten does"]
    else:
        steps = ["flatten the observation in C order, as float32"]
    if policy.observation_dtype == "|u1":
        steps.append("divide by 255")
    if policy.normalise:
        steps.append(f"normalise: (x - observation.mean) * observation.scale, clipped to -{CLIP:g}..{CLIP:g}")
    return steps


def _through_layers(policy: Policy) -> list[str]:
    if policy.dueling:
        return [
            "each layer is x @ weight.T + bias, then the activation, but not after value.1 and advantage.1",
            "output = value + advantage - mean of advantage, where both streams follow the shared layers",
        ]
    if policy.memory == "none":
        return ["each layer is x @ weight.T + bias, then the activation, or after the last layer the output activation"]
    cell, states = ("LSTMCell", "h, then c,") if policy.memory == "lstm" else ("RNNCell", "h")
    return [
        f"each cell is torch.nn.{cell}, with the activation in place of the tanh of its output",
        f"the memory is {states} of each cell in turn, all zeros at the start of an episode",
        "output = x @ weight.T + bias, then the output activation",
    ]


def _to_action(policy: Policy) -> str:
    distribution = policy.distribution
    if isinstance(distribution, Bins):
        return "each component of the action is one of `choices` values from low to high: that of its largest logit"
    if isinstance(distribution, Categorical):
        return "the action is the index of the largest output, of each choice in turn, plus start"
    if isinstance(distribution, Point) and distribution.scaled:
        return "the action is low + (high - low) * (output + 1) / 2, clipped to low..high"
    return "the action is the output, clipped to low..high"


def _json(value: Mapping[str, Any]) -> str:
    """Encode as strict JSON, which knows no infinity: an absent bound is null."""
    finite = {
        key: [None if isinstance(one, float) and math.isinf(one) else one for one in part]
        if isinstance(part, list | tuple)
        else part
        for key, part in value.items()
    }
    return json.dumps(finite, allow_nan=False)
