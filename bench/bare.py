"""The bare environment: the baseline for sampling."""

from __future__ import annotations

import time
from collections.abc import Callable

import gymnasium
import numpy as np

from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.policies.policy import Policy, Weights
from shoal.sampling import tasks
from shoal.sampling.lane_address import LaneAddress, episode_seed


def bare(env_id: str, seconds: float) -> tuple[int, float]:
    """Task: step an environment and do nothing else. Return the steps taken and the seconds they took."""
    env = gymnasium.make(env_id, disable_env_checker=True)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(1000)]
    env.reset(seed=0)
    steps, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset(seed=steps)
            steps += 1
    env.close()
    return steps, passed


def bare_rate(engine: Engine, env_id: str, seconds: float) -> float:
    """Total steps per second of an engine's workers, each with one bare environment and random actions."""
    return _rate(engine, bare, env_id, seconds)


# With the actions of policies: the cost of a step may depend on the action ---------------------------------------


def recorded(env_id: str, policy: Policy, weights: list[Weights], steps: int) -> list[Tree]:
    """Record the seeds and actions of episodes: at least one of each policy, and at least `steps` steps in all."""
    episodes: list[Tree] = []
    while sum(len(episode["actions"]) for episode in episodes) < steps or len(episodes) < len(weights):
        number = len(episodes)
        address: LaneAddress = {
            "seed": 0,
            "purpose": "evaluate",
            "lane": number,
            "width": 1,
            "env": EnvSpec(env_id).to_record(),
        }
        record = tasks.episodes(
            address, policy.to_record(), weights[number % len(weights)], {"episodes": 1}, greedy=True
        )
        actions = policy.distribution.to_env(record["actions"][:, 0])
        episodes.append({"seed": episode_seed(address, slot=0, episode=0), "actions": np.array(actions)})
    return episodes


def replayed(env_id: str, seconds: float, episodes: list[Tree]) -> tuple[int, float]:
    """Task: like `bare`, but repeat recorded episodes."""
    env = gymnasium.make(env_id, disable_env_checker=True)
    known = [(episode["seed"], _listed(episode["actions"])) for episode in episodes]
    steps, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        for seed, actions in known:
            env.reset(seed=seed)
            for action in actions:
                env.step(action)
            steps += len(actions)
    env.close()
    return steps, passed


def replayed_rate(engine: Engine, env_id: str, seconds: float, episodes: list[Tree]) -> float:
    """Total steps per second of an engine's workers, each with one bare environment and recorded episodes."""
    return _rate(engine, replayed, env_id, seconds, episodes)


def _listed(actions: np.ndarray) -> list[object]:
    return actions.tolist() if actions.ndim == 1 else list(actions)


def _rate(engine: Engine, task: Callable[..., tuple[int, float]], *args: object) -> float:
    futures = [engine.submit(task, *args) for _ in range(engine.workers)]
    return float(sum(steps / passed for steps, passed in (future.result() for future in futures)))
