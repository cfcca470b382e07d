"""Evaluate a policy on an engine: play whole episodes, greedily or with sampled actions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import UsageError
from shoal.policies import actions
from shoal.policies.policy import SavedPolicy, Spaces
from shoal.sampling.lane_address import LaneAddress
from shoal.sampling.scores import info_metrics
from shoal.sampling.tasks import Budget, describe, episodes

LANES, WIDTH = 8, 8  # results depend on both


@dataclass(frozen=True)
class Evaluation:
    """Return and length of each episode, in order."""

    returns: np.ndarray
    lengths: np.ndarray
    vector: str | None
    """The native vector environment that the policy was trained in, if any; evaluation always uses Gymnasium's."""
    infos: dict[str, np.ndarray] = field(default_factory=dict)
    """Key of `info` -> its number at the end of each episode, NaN where `info` lacked the key."""

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of returns."""
        return float(self.returns.std())

    def metrics(self) -> dict[str, float]:
        """Report under the names that Stable-Baselines3 uses."""
        known = {key: values[~np.isnan(values)] for key, values in self.infos.items()}
        return {
            "eval/mean_reward": self.mean,
            "eval/std_reward": self.std,
            "eval/mean_ep_length": float(self.lengths.mean()),
            **info_metrics("eval", known),
        }


def evaluate_policy(
    engine: Engine,
    saved: SavedPolicy,
    count: int,
    seed: int = 0,
    sample: bool = False,
    purpose: str = "evaluate",
    width: int = WIDTH,
) -> Evaluation:
    """Play `count` episodes with a policy on an engine; `purpose` and `seed` choose the episodes' random numbers."""
    spec = EnvSpec(**saved.env)
    env = replace(spec, vector=None).to_record()
    if spec.vector:
        _refuse_other_spaces(engine.submit(describe, env).result(), saved)
    weights = engine.share(saved.weights)
    futures = []
    for lane in range(min(LANES, count)):
        address: LaneAddress = {"seed": seed, "purpose": purpose, "lane": lane, "width": width, "env": env}
        budget: Budget = {"episodes": count // LANES + (lane < count % LANES)}
        futures.append(engine.submit(episodes, address, saved.policy.to_record(), weights, budget, not sample))
    records = [future.result() for future in futures]
    keys = dict.fromkeys(key for record in records for key in record.get("infos", {}))
    return Evaluation(
        np.concatenate([record["returns"] for record in records]),
        np.concatenate([record["lengths"] for record in records]),
        spec.vector,
        {
            key: np.concatenate(
                [record.get("infos", {}).get(key, np.full(len(record["returns"]), np.nan)) for record in records]
            )
            for key in keys
        },
    )


def _refuse_other_spaces(spaces: Spaces, saved: SavedPolicy) -> None:
    """Refuse a policy whose vector environment has other spaces than Gymnasium's environment."""
    policy, env = saved.policy, saved.env
    here, there = (spaces["shape"], spaces["dtype"]), (list(policy.observation_shape), policy.observation_dtype)
    shape = actions.from_record(spaces["distribution"]).action_shape
    if here != there or shape != policy.distribution.action_shape:
        raise UsageError(
            f"the policy was trained in {env['id']} of {env['vector']}, with observations {there[0]} {there[1]} and "
            f"actions {policy.distribution.action_shape}. It cannot be evaluated in Gymnasium's, where they are "
            f"{here[0]} {here[1]} and {shape}: only its training return is known"
        )
