"""Tiny environments with known answers, for tests: `shoal.testing.environments:testing/Identity-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

OPTIMUM = 8.0
"""Best return in `testing/Identity-v0`; random actions reach 2."""


class Identity(gymnasium.Env[np.ndarray, np.int64]):
    """The right action is the one that the observation shows (one-hot, of four). Eight steps, each worth 0 or 1."""

    observation_space = spaces.Box(0, 1, (4,), np.float32)
    action_space = spaces.Discrete(4)

    def _observe(self) -> np.ndarray:
        self.right = int(self.np_random.integers(4))
        return np.asarray(np.eye(4)[self.right], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Show the first number."""
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward the right action, and show the next number."""
        reward = float(action == self.right)
        self.steps += 1
        return self._observe(), reward, self.steps == OPTIMUM, False, {}


class Drift(Identity):
    """Episodes of varying length, terminated or truncated, with noisy rewards."""

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward noise around the action; terminate by chance, truncate after 13 steps."""
        self.steps += 1
        reward = float(action + self.np_random.normal())
        return self._observe(), reward, bool(self.np_random.random() < 0.08), self.steps >= 13, {}


class NotFinite(Identity):
    """Returns NaN as the reward, or as part of an observation, at the fifth step of an episode."""

    def __init__(self, what: str) -> None:
        self.what = what

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step as `Identity` does, but break at the fifth step."""
        observation, reward, *rest = super().step(action)
        if self.steps == 5:
            reward, observation[0] = (np.nan, 0.0) if self.what == "reward" else (reward, np.nan)
        return observation, reward, *rest  # type: ignore[return-value]


for _name in ("Identity", "Drift", "NotFinite"):
    gymnasium.register(f"testing/{_name}-v0", entry_point=f"{__name__}:{_name}")
