"""How close does sampling come to the bare environment? Prints ratios, both sides measured in interleaved rounds.

    python bench/lanes.py [--rounds 15] [--seconds 1] [--env CartPole-v1 ...]

Bare is `env.step` with actions drawn beforehand and a seeded reset after each episode, in one process or in two at
once. Shoal samples as it does in training: weights shared anew for each batch, one batched forward pass per step,
results gathered on the head in lane order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import gymnasium
import numpy as np

import shoal
from shoal import rollout, seeding
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec, describe
from shoal.policies import heads
from shoal.policies.policy import Policy

ENVS = ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5")


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
    return steps, passed


class Sampler:
    """One side of the comparison: lanes with a fresh policy, as an algorithm would drive them."""

    def __init__(self, engine: Engine, env_id: str, lanes: int, width: int, steps: int) -> None:
        spec = EnvSpec(env_id)
        spaces = engine.submit(describe, spec.to_tree()).result()
        head = heads.from_tree(spaces["head"])
        policy = Policy(tuple(spaces["shape"]), spaces["dtype"], head, (64, 64), normalise=True)
        self.engine, self.steps = engine, steps
        self.lanes = rollout.Lanes(engine, spec, policy, seed=0, count=lanes, width=width)
        self.weights = {
            "params": policy.init(seeding.rng(0, "weights")),
            "mean": np.zeros(policy.inputs, np.float32),
            "scale": np.ones(policy.inputs, np.float32),
        }
        self.batch = lanes * width * steps
        self.lanes.fragments(engine.share(self.weights), steps)

    def run(self, seconds: float) -> float:
        """Steps per second."""
        steps, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            self.lanes.fragments(self.engine.share(self.weights), self.steps)
            steps += self.batch
        return steps / (time.perf_counter() - begun)


def bare_rate(engine: Engine, env_id: str, seconds: float) -> float:
    """Steps per second of all workers of an engine together, each with one bare environment."""
    futures = [engine.submit(bare, env_id, seconds) for _ in range(engine.workers)]
    return sum(steps / passed for steps, passed in (future.result() for future in futures))


def compare(env_id: str, workers: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of both sides and of the ratio within each round."""
    with shoal.engine("processes", workers=workers) as engine:
        engine.map(describe, [EnvSpec(env_id).to_tree()] * workers)
        sampler = Sampler(engine, env_id, lanes=2 * workers, width=32, steps=128)
        pairs = []
        for _ in range(rounds):
            before = bare_rate(engine, env_id, seconds / 2)
            sampled = sampler.run(seconds)
            after = bare_rate(engine, env_id, seconds / 2)
            pairs.append(((before + after) / 2, sampled))
    ratios = [sampled / alone for alone, sampled in pairs]
    return {
        "bare": statistics.median(alone for alone, _ in pairs),
        "lanes": statistics.median(sampled for _, sampled in pairs),
        "ratio": statistics.median(ratios),
        "spread": f"{min(ratios):.2f} to {max(ratios):.2f}",
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="per side and round")
    parser.add_argument("--env", nargs="*", default=list(ENVS))
    wanted = parser.parse_args()
    print(f"{'environment':16} {'workers':>7} {'bare/s':>9} {'lanes/s':>9} {'ratio':>6}  spread")
    for env_id in wanted.env:
        for workers in (1, 2):
            row = compare(env_id, workers, wanted.rounds, wanted.seconds)
            print(
                f"{env_id:16} {workers:7} {row['bare']:9,.0f} {row['lanes']:9,.0f} {row['ratio']:6.2f}  "
                f"{row['spread']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
