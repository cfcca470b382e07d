"""Evaluate a saved policy: play whole episodes, greedily or with sampled actions, on any engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal import engines
from shoal.base.seeding import MAX_SEED
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import UsageError
from shoal.policies import actions
from shoal.policies.policy import SavedPolicy, Spaces
from shoal.runs.folder import policy_file
from shoal.runs.trust import trust_policy
from shoal.sampling.lane_address import LaneAddress
from shoal.sampling.tasks import Budget, describe, episodes

LANES, WIDTH = 8, 8  # results depend on both


@dataclass(frozen=True)
class Evaluation:
    """Return and length of each episode, in order."""

    returns: np.ndarray
    lengths: np.ndarray
    vector: str | None
    """The native vector environment that the policy was trained in, if any; evaluation always uses Gymnasium's."""

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of returns."""
        return float(self.returns.std())


def evaluate_run(
    run: str, root: Path, *, count: int = 100, seed: int = 0, sample: bool = False, engine: str = "processes",
    workers: int | None = None, allow: Collection[str] = (),
) -> Evaluation:  # fmt: skip
    """Play `count` episodes with the newest policy of a run, or with a policy file."""
    problems = engines.engine_problems(engine, workers)
    if count < 1:
        problems.append(f"episodes must be at least 1, not {count}")
    if not 0 <= seed <= MAX_SEED:
        problems.append(f"seed must be in 0..{MAX_SEED}, not {seed}")
    if problems:
        raise UsageError(problems)
    saved = SavedPolicy.load(policy_file(run, root))
    trust_policy(run, root, saved.env, allow)
    with engines.make(engine, workers) as pool:
        return evaluate_policy(pool, saved, count, seed, sample)


def evaluate_policy(engine: Engine, saved: SavedPolicy, count: int, seed: int = 0, sample: bool = False) -> Evaluation:
    """Play `count` episodes with a policy on an engine."""
    spec = EnvSpec(**saved.env)
    env = replace(spec, vector=None).to_record()
    if spec.vector:
        _refuse_other_spaces(engine.submit(describe, env).result(), saved)
    weights = engine.share(saved.weights)
    futures = []
    for lane in range(min(LANES, count)):
        address: LaneAddress = {"seed": seed, "purpose": "evaluate", "lane": lane, "width": WIDTH, "env": env}
        budget: Budget = {"episodes": count // LANES + (lane < count % LANES)}
        futures.append(engine.submit(episodes, address, saved.policy.to_record(), weights, budget, not sample))
    records = [future.result() for future in futures]
    return Evaluation(
        np.concatenate([record["returns"] for record in records]),
        np.concatenate([record["lengths"] for record in records]),
        spec.vector,
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
