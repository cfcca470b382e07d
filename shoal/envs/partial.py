"""Classic tasks with the velocities hidden: what the last observation alone does not tell needs memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv


class Shown(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Only these entries of an observation (n,) are shown."""

    def __init__(self, env: gymnasium.Env[np.ndarray, Any], entries: Sequence[int]) -> None:
        super().__init__(env)
        self._entries = list(entries)
        space = env.observation_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise TypeError(f"entries of {space} cannot be picked")
        low, high = space.low[self._entries], space.high[self._entries]
        self.observation_space = gymnasium.spaces.Box(low, high, dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """What is shown of an observation."""
        return observation[self._entries]


def cart_pole(**kwargs: Any) -> Shown:
    """CartPole: the place of the cart and the angle of the pole (2,)."""
    return Shown(CartPoleEnv(**kwargs), (0, 2))


def pendulum(**kwargs: Any) -> Shown:
    """Pendulum: cosine and sine of its angle (2,)."""
    return Shown(PendulumEnv(**kwargs), (0, 1))
