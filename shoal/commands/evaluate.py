"""How good is a saved policy? Whole episodes with the likeliest actions, on any engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal import engines
from shoal.base.seeding import MAX_SEED
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import UsageError
from shoal.policies import actions
from shoal.policies.policy import SavedPolicy
from shoal.runs.folder import policy_file
from shoal.sampling.address import LaneAddress
from shoal.sampling.tasks import Budget, Spaces, describe, episodes

LANES, WIDTH = 8, 8  # part of the result, as everywhere


@dataclass(frozen=True)
class Evaluation:
    """Return and length of each episode, in order."""

    returns: np.ndarray
    lengths: np.ndarray
    vector: str | None
    """As which native vector environment it was learned in, if it was. It is played in Gymnasium's own in any case."""


def evaluate_run(
    run: str, root: Path, *, count: int = 100, seed: int = 0, sample: bool = False, engine: str = "processes",
    workers: int | None = None,
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
    with engines.make(engine, workers) as pool:
        return evaluate_policy(pool, saved, count, seed, sample)


def evaluate_policy(engine: Engine, saved: SavedPolicy, count: int, seed: int = 0, sample: bool = False) -> Evaluation:
    """Play `count` episodes with a policy on an engine."""
    spec = EnvSpec(**saved.env)
    env = replace(spec, vector=None).to_record()
    if spec.vector:
        _refuse_others(engine.submit(describe, env).result(), saved)
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


def _refuse_others(spaces: Spaces, saved: SavedPolicy) -> None:
    """A native vector environment may see and do other things than the one that it is played in."""
    policy, env = saved.policy, saved.env
    here, there = (spaces["shape"], spaces["dtype"]), (list(policy.observation_shape), policy.observation_dtype)
    shape = actions.from_record(spaces["distribution"]).action_shape
    if here != there or shape != policy.distribution.action_shape:
        raise UsageError(
            f"the policy was learned in {env['id']} of {env['vector']}, with observations {there[0]} {there[1]} and "
            f"actions {policy.distribution.action_shape}. It cannot be played in Gymnasium's, where they are {here[0]} "
            f"{here[1]} and {shape}; its training return is all there is"
        )
