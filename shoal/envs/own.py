"""Shoal's own environments. Importing this registers them with Gymnasium; `make_env` does so for every `shoal/...`."""

from __future__ import annotations

import gymnasium

ENVIRONMENTS = {
    "shoal/CartPolePartial-v1": ("shoal.envs.partial:cart_pole", 500, 475.0),
    "shoal/Go9x9-v0": ("shoal.envs.go:Go", 100, None),
    "shoal/PendulumPartial-v1": ("shoal.envs.partial:pendulum", 200, None),
}
"""Id of each, what makes it, steps after which an episode is cut off, and the return from which it counts as solved."""

for name, (entry_point, steps, solved) in ENVIRONMENTS.items():
    gymnasium.register(name, entry_point=entry_point, max_episode_steps=steps, reward_threshold=solved)
