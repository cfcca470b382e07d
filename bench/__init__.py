"""`shoal bench`: Shoal compared with its peers and with the bare environment.

    PARTS        each part is a module with `OPTIONS` and `run(options, say) -> Report`
    rounds.py    interleaved measurements; medians of ratios within a round
    watch.py     a library that trains in its own process and logs its progress
    contest.py   libraries at equal settings, in steps per second
    peers/       the peers' virtualenv, and the scripts that run in it
    report.py    tables, and the page they are written to

A time alone tells more about the machine than about the code. So all sides are measured in one session, in turns, and
the reports give ratios.
"""

from __future__ import annotations

PARTS = {
    "lanes": ("lanes", "sampling compared with the bare environment"),
    "ppo": ("ppo", "PPO at equal settings compared with Stable-Baselines3, SBX and RLlib, in steps per second"),
    "trpo": ("trpo", "TRPO at equal settings compared with sb3-contrib, in steps per second"),
    "time": ("reach", "time to a score, each library with its best known settings"),
    "dqn": ("dqn", "DQN compared with Stable-Baselines3 and with one remote call per transition"),
    "engines": ("engines", "overhead of each engine per task, and training on it compared with processes"),
    "es": ("es", "evolution strategies compared with the bare environment, EvoTorch and Ray tasks; the head's cost"),
    "learn": ("learn", "scores of the presets over seeds, next to published ones"),
    "ray": ("ray", "TRPO on Ray compared with processes; Pong from RAM, serial and parallel"),
    "redis": ("redis", "the redis engine compared with processes: steps, time per task, bytes, hundreds of workers"),
    "api": ("api", "import, loading a policy and its actions, from Python"),
    "startup": ("startup", "time to the first environment step, and a worker's memory"),
}
"""Name of each part, its module, and what it measures."""

ALL = ("lanes", "ppo", "trpo", "time", "dqn", "es")
"""The parts that `shoal bench` runs if none is named."""
