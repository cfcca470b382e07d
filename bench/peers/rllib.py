"""Trains with RLlib's PPO, on its new API stack. Run by the peers' Python.

    python rllib.py '{"env": "CartPole-v1", "runners": 2, "envs": 8, "seed": 0, "steps": 100000, "network": {...},
                      "settings": {"lr": 0.0003, ...}}'

Prints a line of JSON after each iteration: steps, seconds, mean return of the last 100 episodes.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def main(job: dict[str, Any]) -> None:
    """Train for the given steps, or until the process is stopped."""
    # Ray's files go to the current folder, which is deleted with the process.
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=str(Path.cwd()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that Ray stops its processes
    config = (
        PPOConfig()
        .environment(job["env"])
        .framework("torch")
        .env_runners(num_env_runners=job["runners"], num_envs_per_env_runner=job["envs"])
        .learners(num_learners=0)
        .rl_module(model_config=DefaultModelConfig(**job["network"]))
        .training(**job["settings"])
        .reporting(metrics_num_episodes_for_smoothing=100, min_time_s_per_iteration=0)
        .debugging(seed=job["seed"], log_level="ERROR")
    )
    algorithm = config.build_algo()
    steps = 0
    while steps < job["steps"]:
        result = algorithm.train()
        steps = int(result["num_env_steps_sampled_lifetime"])
        mean = float(result["env_runners"].get("episode_return_mean", math.nan))
        line = {"steps": steps, "seconds": time.perf_counter(), "return": None if math.isnan(mean) else mean}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
