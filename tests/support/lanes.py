"""Lanes of small environments, with a policy of fixed weights."""

import numpy as np

from shoal.base import seeding
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.policies import actions
from shoal.policies.policy import Policy
from shoal.sampling import lanes, tasks
from shoal.sampling.tasks import describe

WALK = EnvSpec("tests.support.toys:Walk-v0")


def policy_for(env: EnvSpec, normalise: bool = True) -> tuple[Policy, Tree]:
    spaces = describe(env.to_record())
    policy = Policy(
        tuple(spaces["shape"]), spaces["dtype"], actions.from_record(spaces["distribution"]), (8,), normalise=normalise
    )
    size = policy.inputs
    weights = {
        "params": policy.init(seeding.rng(3, "weights")) * 5,
        "mean": np.full(size, 0.1, np.float32),
        "scale": np.full(size, 0.7, np.float32),
    }
    return policy, weights


def head_side(engine: Engine, env: EnvSpec, count: int = 2, width: int = 3, state: Tree | None = None) -> lanes.Lanes:
    return lanes.Lanes(engine, env, policy_for(env)[0], seed=5, count=count, width=width, state=state)


def forget_everything() -> None:
    """As if the next task came to another worker."""
    tasks.held.clear()
