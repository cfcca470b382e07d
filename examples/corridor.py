"""An environment and a wrapper of your own: shoal train ppo ./examples/corridor.py:Corridor"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Corridor(gymnasium.Env[np.ndarray, np.int64]):
    """Walk to the right end of a corridor. Each step costs a little; the end is worth 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.steps = int(self.np_random.integers(self.length)), 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at = max(0, self.at + (1 if action else -1))
        self.steps += 1
        reached = self.at == self.length
        return self._observation(), float(reached) - 0.01, reached, self.steps == 100, {"is_success": reached}

    def _observation(self) -> np.ndarray:
        return np.array([self.at / self.length], np.float32)


class Noisy(gymnasium.ObservationWrapper[np.ndarray, Any, Any]):
    """Adds noise to observations, from the generator that the episode's seed sets."""

    def __init__(self, env: gymnasium.Env[np.ndarray, Any], scale: float = 0.01) -> None:
        super().__init__(env)
        self.scale = scale

    def observation(self, observation: np.ndarray) -> np.ndarray:
        noise = self.np_random.normal(0, self.scale, observation.shape)
        return np.clip(observation + noise, 0, 1).astype(np.float32)
