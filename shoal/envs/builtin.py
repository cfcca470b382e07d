"""Shoal's own environments. Importing this module registers them; `make_env` imports it for every `shoal/...`."""

from __future__ import annotations

import gymnasium

ENVIRONMENTS = {
    "shoal/CartPolePartial-v1": ("shoal.envs.partial:cart_pole", 500, 475.0),
    "shoal/Go9x9-v0": ("shoal.envs.go:Go", 100, None),
    "shoal/PendulumPartial-v1": ("shoal.envs.partial:pendulum", 200, None),
}
"""Id -> entry point, maximum episode steps, and the return from which the environment counts as solved."""

for name, (entry_point, steps, solved) in ENVIRONMENTS.items():
    gymnasium.register(name, entry_point=entry_point, max_episode_steps=steps, reward_threshold=solved)
