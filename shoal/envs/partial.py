"""Partially observable versions of classic control tasks: without velocities, so a good policy needs memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv


class Shown(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Keep only some entries of an observation (n,)."""

    def __init__(self, env: gymnasium.Env[np.ndarray, Any], entries: Sequence[int]) -> None:
        super().__init__(env)
        self._entries = list(entries)
        space = env.observation_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise TypeError(f"cannot select entries of {space}; it must be a Box")
        low, high = space.low[self._entries], space.high[self._entries]
        self.observation_space = gymnasium.spaces.Box(low, high, dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self._entries]


def cart_pole(**kwargs: Any) -> Shown:
    """Make CartPole with the observation (2,): position of the cart and angle of the pole."""
    return Shown(CartPoleEnv(**kwargs), (0, 2))


def pendulum(**kwargs: Any) -> Shown:
    """Make Pendulum with the observation (2,): cosine and sine of the angle."""
    return Shown(PendulumEnv(**kwargs), (0, 1))
