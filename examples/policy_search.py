"""A plain NumPy policy search, made parallel in five lines. Works on every engine and with any number of workers.

    python examples/policy_search.py                       # all cores
    python examples/policy_search.py --engine serial       # this process only: the same result

The lines marked with <- are all that Shoal adds to the script.
"""

import argparse
import time

import gymnasium
import numpy as np

import shoal  # <-


def episode_return(seed: int, weights: np.ndarray) -> float:
    """Play one episode of CartPole with a linear policy that `seed` perturbs."""
    noise = np.random.default_rng(seed).normal(size=weights.shape)
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        action = int(observation @ (weights + 0.5 * noise) > 0)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    env.close()
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--workers", type=int, default=None)
    wanted = parser.parse_args()
    weights, begun = np.zeros(4), time.perf_counter()
    with shoal.engine(wanted.engine, workers=wanted.workers) as engine:  # <-
        for generation in range(10):
            seeds = [generation * 64 + i for i in range(64)]
            shared = engine.share(weights)  # <-
            returns = engine.map(episode_return, seeds, shared)  # <- was: [episode_return(s, weights) for s in seeds]
            best = np.argsort(returns)[-8:]
            noise = [np.random.default_rng(seeds[i]).normal(size=4) for i in best]
            weights = weights + 0.5 * np.mean(noise, axis=0)
            print(f"generation {generation}: mean return {np.mean(returns):.1f}, best {max(returns):.0f}")
    print(f"weights {weights.round(6).tolist()} after {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":  # <- workers import this file to find `episode_return`
    main()
