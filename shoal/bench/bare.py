"""The bare environment: what sampling is held against."""

from __future__ import annotations

import time

import gymnasium

from shoal.engines.base import Engine


def bare(env_id: str, seconds: float) -> tuple[int, float]:
    """Task: step an environment with nothing around it; steps taken and seconds needed."""
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
    """Steps per second of all workers of an engine together, each with one bare environment."""
    futures = [engine.submit(bare, env_id, seconds) for _ in range(engine.workers)]
    return float(sum(steps / passed for steps, passed in (future.result() for future in futures)))
