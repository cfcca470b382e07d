"""DQN in the design of a well-known Ray tutorial: acting tasks, a parameter server, a replay buffer and a trainer.

Every transition is a remote call, and so is every request for the buffer's length or a minibatch. Written from
scratch after that design, with its network (24, 48), minibatch of 64 and decay of epsilon per episode. Run by
the peers' Python:

    python ray_dqn.py '{"env": "CartPole-v1", "actors": 2, "seed": 0}'

Prints a line of JSON every half second: environment steps, gradient steps, mean return of the last 100 episodes.
"""

from __future__ import annotations

import collections
import json
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from torch import nn

WARM_UP, TARGET_EVERY, MINIBATCH, GAMMA = 10_000, 1000, 64, 0.99
EPSILON_DECAY, EPSILON_LAST = 0.9995, 0.01


def network(inputs: int, actions: int) -> Any:
    """Build a network that estimates action values."""
    return nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, actions))


def sizes(env: Any) -> tuple[int, int]:
    """Return the length of an observation and the number of actions."""
    return env.observation_space.shape[0], int(env.action_space.n)


@ray.remote  # type: ignore[untyped-decorator,unused-ignore]
class Parameters:
    """The newest weights, and the number of gradient steps so far."""

    def __init__(self, weights: Any) -> None:
        self.weights, self.updates = weights, 0

    def get(self) -> Any:
        return self.weights

    def put(self, weights: Any) -> None:
        self.weights, self.updates = weights, self.updates + 1

    def count(self) -> int:
        return self.updates


@ray.remote  # type: ignore[untyped-decorator,unused-ignore]
class Buffer:
    """Transitions, and the returns of the last episodes."""

    def __init__(self, size: int, seed: int) -> None:
        self.transitions: collections.deque[Any] = collections.deque(maxlen=size)
        self.returns: collections.deque[float] = collections.deque(maxlen=100)
        self.added = 0
        self.rng = np.random.default_rng(seed)

    def add(self, *transition: Any) -> None:
        self.transitions.append(transition)
        self.added += 1

    def ended(self, total: float) -> None:
        self.returns.append(total)

    def length(self) -> int:
        return len(self.transitions)

    def sample(self, count: int) -> list[np.ndarray]:
        chosen = [self.transitions[index] for index in self.rng.integers(0, len(self.transitions), count)]
        return [np.array(column) for column in zip(*chosen, strict=True)]

    def progress(self) -> tuple[int, float | None]:
        """Return environment steps and the mean return of the last episodes."""
        return self.added, float(np.mean(self.returns)) if self.returns else None


@ray.remote  # type: ignore[untyped-decorator,unused-ignore]
def act(parameters: Any, buffer: Any, env_id: str, seed: int) -> None:
    """Play episodes until stopped, with weights fetched before each."""
    torch.set_num_threads(1)
    env = gymnasium.make(env_id)
    inputs, actions = sizes(env)
    values, epsilon, rng = network(inputs, actions), 1.0, np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    while True:
        values.load_state_dict(ray.get(parameters.get.remote()))
        over, total = False, 0.0
        while not over:
            if rng.random() < epsilon:
                action = int(rng.integers(actions))
            else:
                with torch.no_grad():
                    action = int(values(torch.from_numpy(observation)).argmax())
            following, reward, terminated, truncated, _ = env.step(action)
            buffer.add.remote(observation, action, np.float32(reward), following, np.float32(terminated))
            observation, over, total = following, terminated or truncated, total + float(reward)
        observation, _ = env.reset()
        buffer.ended.remote(total)
        epsilon = max(EPSILON_LAST, EPSILON_DECAY * epsilon)


@ray.remote  # type: ignore[untyped-decorator,unused-ignore]
def learn(parameters: Any, buffer: Any, inputs: int, actions: int) -> None:
    """Take gradient steps until stopped, once the buffer has enough transitions."""
    torch.set_num_threads(1)
    values, target = network(inputs, actions), network(inputs, actions)
    values.load_state_dict(ray.get(parameters.get.remote()))
    target.load_state_dict(values.state_dict())
    optimizer, updates = torch.optim.Adam(values.parameters(), lr=1e-3), 0
    while True:
        if ray.get(buffer.length.remote()) < WARM_UP:
            continue
        columns = [torch.from_numpy(column) for column in ray.get(buffer.sample.remote(MINIBATCH))]
        observations, chosen, rewards, following, terminated = columns
        aim = rewards + (1 - terminated) * GAMMA * target(following).max(-1).values
        found = values(observations).gather(1, chosen[:, None])[:, 0]
        loss = nn.functional.mse_loss(found, aim.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        parameters.put.remote(values.state_dict())
        if updates % TARGET_EVERY == 0:
            target.load_state_dict(values.state_dict())


def main(job: dict[str, Any]) -> None:
    """Train until the process is stopped."""
    ray.init(address="local", num_cpus=job["actors"] + 3, include_dashboard=False, log_to_driver=False)
    env = gymnasium.make(job["env"])
    inputs, actions = sizes(env)
    torch.manual_seed(job["seed"])
    parameters = Parameters.remote(  # type: ignore[attr-defined]
        network(inputs, actions).state_dict()
    )
    buffer = Buffer.remote(  # type: ignore[attr-defined]
        100_000, job["seed"]
    )
    running = [act.remote(parameters, buffer, job["env"], job["seed"] * 100 + i) for i in range(job["actors"])]
    running.append(learn.remote(parameters, buffer, inputs, actions))
    while not ray.wait(running, timeout=0.5)[0]:
        steps, mean = ray.get(buffer.progress.remote())
        updates = ray.get(parameters.count.remote())
        print(
            json.dumps({"steps": steps, "updates": updates, "seconds": time.perf_counter(), "return": mean}), flush=True
        )
    ray.get(running)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
