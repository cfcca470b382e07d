"""A plain evolution strategy in NumPy whose evaluations are Ray tasks. Run by the peers' Python.

    python ray_es.py '{"env": "CartPole-v1", "hidden": [], "population": 64, "episodes": 8, "tasks": 2,
                       "seed": 0}'

Each task plays its share of a generation, one policy after the other. Prints a line of JSON after each generation:
steps, seconds, mean return.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import ray

SIGMA, LR = 0.05, 1e-12
_envs: dict[str, Any] = {}  # kept between tasks, because Ray runs many in one process


def forward(layers: list[Any], x: Any) -> Any:
    """Compute the output of a network."""
    *hidden, (weights, bias) = layers
    for hidden_weights, hidden_bias in hidden:
        x = np.tanh(x @ hidden_weights + hidden_bias)
    return x @ weights + bias


def cut(params: Any, sizes: list[int]) -> list[Any]:
    """Split a flat vector into the layers of a network."""
    layers, start = [], 0
    for rows, columns in itertools.pairwise(sizes):
        middle, end = start + rows * columns, start + (rows + 1) * columns
        layers.append((params[start:middle].reshape(rows, columns), params[middle:end]))
        start = end
    return layers


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator,unused-ignore]
def evaluate(name: str, sizes: list[int], centre: Any, seeds: list[int], episodes: int) -> list[tuple[float, int]]:
    """Return the total reward and the number of steps of each policy's episodes."""
    if name not in _envs:
        _envs[name] = gymnasium.make(name, disable_env_checker=True)
    env, found = _envs[name], []
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    for seed in seeds:
        step = np.random.default_rng(abs(seed)).standard_normal(len(centre)).astype(np.float32)
        layers = cut(centre + SIGMA * np.sign(seed) * step, sizes)
        total, length = 0.0, 0
        for episode in range(episodes):
            observation, _ = env.reset(seed=(abs(seed) + episode) % 2**31)
            over = False
            while not over:
                out = forward(layers, np.asarray(observation, np.float32))
                action = int(out.argmax()) if discrete else np.clip(out, env.action_space.low, env.action_space.high)
                observation, reward, terminated, truncated, _ = env.step(action)
                total, length, over = total + float(reward), length + 1, terminated or truncated
        found.append((total, length))
    return found


def main(job: dict[str, Any]) -> None:
    """Search until the process is stopped."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    env: Any = gymnasium.make(job["env"])
    space = env.action_space
    outputs = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else space.shape[0]
    sizes = [env.observation_space.shape[0], *job["hidden"], outputs]
    rng = np.random.default_rng(job["seed"])
    centre = np.zeros(sum((a + 1) * b for a, b in itertools.pairwise(sizes)), np.float32)
    steps = 0
    while True:
        drawn = rng.integers(1, 2**31, job["population"] // 2)
        seeds = np.stack([drawn, -drawn], axis=1).ravel()
        shared = ray.put(centre)
        pieces = np.array_split(seeds, job["tasks"])
        work = [evaluate.remote(job["env"], sizes, shared, piece.tolist(), job["episodes"]) for piece in pieces]
        results = ray.get(work)
        scores = np.array([score for result in results for score, _ in result])
        steps += sum(length for result in results for _, length in result)
        ranks = scores.argsort().argsort() / (len(scores) - 1) - 0.5
        for number, seed in enumerate(drawn):
            step = np.random.default_rng(seed).standard_normal(len(centre)).astype(np.float32)
            centre += LR * (ranks[2 * number] - ranks[2 * number + 1]) / (len(scores) * SIGMA) * step
        line = {"steps": int(steps), "seconds": time.perf_counter(), "return": float(scores.mean()), "updates": 0}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
