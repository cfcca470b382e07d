"""A policy search in plain NumPy, made parallel with Shoal in five lines: those marked with "# <-".

    python examples/policy_search.py                       # on all cores
    python examples/policy_search.py --engine serial       # in this process only

The result is the same on every engine and with any number of workers.
"""

import argparse
import time

import gymnasium
import numpy as np

import shoal  # <-


def episode_return(seed: int, weights: np.ndarray) -> float:
    """Play one episode of CartPole with a linear policy, after adding noise drawn from `seed` to its weights."""
    noise = np.random.default_rng(seed).normal(size=weights.shape)
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        action = int(observation @ (weights + 0.5 * noise) > 0)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, done = total + float(reward), terminated or truncated
    env.close()
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--workers", type=int, default=None, help="default: one per core")
    args = parser.parse_args()
    weights, start = np.zeros(4), time.perf_counter()
    with shoal.engine(args.engine, workers=args.workers) as engine:  # <-
        for generation in range(10):
            seeds = [generation * 64 + i for i in range(64)]
            shared = engine.share(weights)  # <-
            returns = engine.map(episode_return, seeds, shared)  # <- was: [episode_return(s, weights) for s in seeds]
            best = np.argsort(returns)[-8:]
            noise = [np.random.default_rng(seeds[i]).normal(size=4) for i in best]  # the same noise as on the workers
            weights = weights + 0.5 * np.mean(noise, axis=0)
            print(f"generation {generation}: mean return {np.mean(returns):.1f}, best {max(returns):.0f}")
    print(f"weights {weights.round(6).tolist()} after {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":  # <- because workers import this file to find `episode_return`
    main()
