"""A user's environment, wrappers and factories, none of them registered."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 20


class GridWorld(gymnasium.Env[Any, Any]):
    """Walk left on a line: one point for each step at its end. Its observations are no arrays."""

    observation_space = spaces.Dict({"at": spaces.Discrete(5), "hint": spaces.Text(6), "size": spaces.Box(0, 9, (2,))})
    action_space = spaces.Discrete(2)

    def __init__(self, size: int = 5) -> None:
        if size > 5:
            raise ValueError(f"the line has 5 places, not {size}")
        self.size = size

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.time = int(self.np_random.integers(self.size)), 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at = min(self.size - 1, max(0, self.at + (1 if action else -1)))
        self.time += 1
        reached, ended = self.at == 0, self.time == LENGTH
        info = {"is_success": reached, "distance": self.at} if ended else {}
        return self._observation(), float(reached), False, ended, info

    def _observation(self) -> dict[str, Any]:
        return {"at": self.at, "hint": "left", "size": np.array([self.size, self.time / LENGTH], np.float32)}


class Scale(gymnasium.RewardWrapper[Any, Any]):
    """Multiplies rewards."""

    def __init__(self, env: gymnasium.Env[Any, Any], factor: float = 2.0) -> None:
        super().__init__(env)
        self.factor = factor

    def reward(self, reward: Any) -> float:
        return float(reward) * self.factor


def make_grid(size: int = 3) -> gymnasium.Env[Any, Any]:
    """A function that makes an environment."""
    return GridWorld(size)


def make_vector(num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """A function that makes a vector environment."""
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def make_nothing() -> None:
    """A function that makes no environment."""
