"""`shoal bench`: Shoal side by side with peers and with the bare environment.

    PARTS        each part is a module with `Options` and `run(options, say) -> Report`
    rounds.py    interleaved measuring; medians of ratios within a round
    watch.py     a library as a process that trains and says how far it is
    contest.py   libraries at equal settings, in steps per second
    peers/       the peers' own virtualenv, and the scripts that run in it
    report.py    tables, and the page they are written to

A time alone says more about the machine than about the code. So all sides are measured in one sitting, in turns, and
what is reported are ratios.
"""

from __future__ import annotations

PARTS = {
    "lanes": ("lanes", "sampling beside the bare environment"),
    "ppo": ("ppo", "PPO at equal settings beside Stable-Baselines3, SBX and RLlib, in steps per second"),
    "trpo": ("trpo", "TRPO at equal settings beside sb3-contrib, in steps per second"),
    "time": ("reach", "time to a score, each library with its best known settings"),
    "dqn": ("dqn", "DQN beside Stable-Baselines3 and beside one remote call per transition"),
    "engines": ("engines", "what each engine adds to a task, and training on it beside processes"),
    "es": ("es", "evolution strategies beside the bare environment, EvoTorch and Ray tasks; the head's cost"),
    "learn": ("learn", "scores of the presets over seeds, beside published ones"),
    "ray": ("ray", "TRPO on Ray beside processes; Pong from RAM, serial and parallel"),
    "redis": ("redis", "the redis engine beside processes: steps, time per task, bytes, hundreds of workers"),
    "startup": ("startup", "time to the first environment step, and a worker's memory"),
}
"""Name of each part, its module, and what it measures."""

ALL = ("lanes", "ppo", "trpo", "time", "dqn", "es")
"""What `shoal bench` runs when it is given no name."""
