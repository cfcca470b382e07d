"""The metrics of one iteration, as `metrics.jsonl` and trackers receive them."""

from __future__ import annotations

from typing import NotRequired, TypedDict

MetricsRow = TypedDict(
    "MetricsRow",
    {
        "iteration": int,
        "time/total_timesteps": int,
        "time/sample_seconds": float,
        "time/learn_seconds": float,
        "time/overlap_seconds": NotRequired[float],
        "time/fps": float,
        "time/time_elapsed": float,
        "time/idle_share": float,
        "time/lost_workers": int,
        "time/limited_by": str,
        "time/workers": int,
        "time/workers_suited": int,
        "rollout/episodes": NotRequired[int],
        "rollout/ep_rew_mean": NotRequired[float],
        "rollout/ep_len_mean": NotRequired[float],
        "rollout/success_rate": NotRequired[float],
        "eval/mean_reward": NotRequired[float],
        "eval/std_reward": NotRequired[float],
        "eval/mean_ep_length": NotRequired[float],
        "eval/success_rate": NotRequired[float],
        "digest": str,
        "digests": dict[str, str],
    },
)
"""One iteration. Algorithms add further numbers, such as `train/learning_rate`. Names follow Stable-Baselines3.

- `time/fps`, `time/time_elapsed`: environment steps per second of this sitting; seconds of the whole run
- `time/idle_share`: share of the workers' time in which they had no task
- `time/limited_by`, `time/workers_suited`: what limits the speed, and the number of workers that would suit
- `rollout/ep_rew_mean`: mean return of the last 100 episodes, absent until one has ended
- `rollout/success_rate`: share of these that ended with `info["is_success"]`, if the environment reports that
- `eval/...`: greedy episodes, with `--eval-every`; in a search, the episodes of the current policy itself
- `digest`: digest of everything learned; `digests` has one for each part of it
"""
