"""Trains with Stable-Baselines3, sb3-contrib or SBX, which share one interface. Run by the peers' Python.

    python sb3.py '{"library": "sb3", "algo": "PPO", "env": "CartPole-v1", "envs": 8, "subprocesses": false,
                    "seed": 0, "steps": 100000, "settings": {"n_steps": 256}}'

Prints a line of JSON after each rollout: steps, seconds, gradient steps, mean return of the last 100 episodes.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

LIBRARIES = {"sb3": "stable_baselines3", "sb3-contrib": "sb3_contrib", "sbx": "sbx"}


class Lines(BaseCallback):  # type: ignore[misc]
    """Prints progress after each rollout."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        ended = [episode["r"] for episode in self.model.ep_info_buffer]
        mean = sum(ended) / len(ended) if ended else None
        line = {"steps": self.num_timesteps, "seconds": time.perf_counter(), "return": mean}
        line["updates"] = self.model._n_updates
        print(json.dumps(line, default=float), flush=True)


def value_of(setting: Any) -> Any:
    """Convert a setting: in rl-zoo, "lin_0.001" is a value that falls linearly to zero."""
    if isinstance(setting, str) and setting.startswith("lin_"):
        first = float(setting.removeprefix("lin_"))
        fall: Callable[[float], float] = lambda left: left * first  # noqa: E731
        return fall
    return setting


def main(job: dict[str, Any]) -> None:
    """Train for the given steps, or until the process is stopped."""
    algorithm = getattr(importlib.import_module(LIBRARIES[job["library"]]), job["algo"])
    kind = SubprocVecEnv if job["subprocesses"] else DummyVecEnv
    envs = make_vec_env(job["env"], n_envs=job["envs"], seed=job["seed"], vec_env_cls=kind)
    settings = {key: value_of(setting) for key, setting in job["settings"].items()}
    model = algorithm("MlpPolicy", envs, seed=job["seed"], device="cpu", **settings)
    model.learn(job["steps"], callback=Lines())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
