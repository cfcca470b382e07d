"""A policy search in plain NumPy and shoal.spmd: each process evaluates its share of the candidates.

    python examples/spmd/search.py --processes 2

Every process knows all candidates and, after `allgather`, all returns. Each candidate has its own environment seed, so
the result is the same with any number of processes.
"""

import argparse

import gymnasium
import numpy as np

from shoal import spmd


def episode_return(env: gymnasium.Env, weights: np.ndarray, seed: int) -> float:
    """Play one episode of CartPole with a linear policy."""
    observation, _ = env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(int(observation @ weights > 0))
        total, done = total + float(reward), terminated or truncated
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--generations", type=int, default=5)
    args = parser.parse_args()
    spmd.launch(args.processes)
    env = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(1)  # the same seed on every rank: each rank draws the same candidates
    mean = np.zeros(4)
    for generation in range(args.generations):
        candidates = mean + rng.normal(size=(32, 4))
        mine = np.array_split(np.arange(32), spmd.size())[spmd.rank()]
        returns = spmd.allgather([episode_return(env, candidates[i], seed=32 * generation + int(i)) for i in mine])
        mean = candidates[np.argsort(returns, kind="stable")[-4:]].mean(axis=0)
        spmd.print0(f"generation {generation}: mean return {returns.mean():.1f}, best {returns.max():.0f}")
    spmd.print0(f"weights {mean.tolist()}")


if __name__ == "__main__":
    main()
