"""Settings of a run, except the algorithm's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from shoal import engines
from shoal.base import validation
from shoal.base.seeding import MAX_SEED
from shoal.envs.make import EnvSpec, env_problems
from shoal.runs.folder import name_problems
from shoal.runs.goal import Goal


@dataclass(frozen=True)
class Settings:
    """Settings of a run, except the algorithm's."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """Environment: a Gymnasium id, or module:Env-v0 to import the module that registers it."""
    steps: Annotated[int, tyro.conf.arg(aliases=["-n", "--total-timesteps"])] = 100_000
    """Total environment steps (at least)."""
    iterations: int | None = None
    """Stop after this many iterations instead (default: stop by --steps)."""
    seed: int = 0
    """Random seed: determines every random number of the run."""
    engine: str = "processes"
    """What runs the environments: serial, processes, mpi, ray or redis; ray and redis also as ray://HOST:PORT. Does not
    change the result."""
    workers: int | None = None
    """Number of workers (default: one per core; on redis, how many to wait for). Does not change the result."""
    engine_options: str = "{}"
    """Options of the engine, as JSON. For ray: placement (spread or pack), num_cpus, resources, runtime_env."""
    env_kwargs: str = "{}"
    """Keyword arguments for the environment, as JSON."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps (default: the environment's limit)."""
    step_limit: int = 100_000
    """Fail if an episode is longer than this: its environment probably never ends it."""
    recreate_after: int = 0
    """Re-create environments after this many episodes, for those that leak memory (0: never)."""
    vector: Literal["envpool", "gymnasium"] | None = None
    """Step each lane as one native vector environment: EnvPool's, or the one that the environment registers with
    Gymnasium. A different implementation, so a different result, but the same on every engine
    (default: single environments)."""
    runs: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """Name of this run (default: algorithm, environment and a number)."""
    checkpoint_every: int = 50
    """Maximum number of iterations between checkpoints."""
    checkpoint_seconds: float = 60.0
    """Maximum number of seconds between checkpoints."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep."""
    learner_threads: int | None = None
    """Threads of the learner (default: chosen by network size). Changes the last bits, so the run records it."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where to learn. Changes the last bits, so the run records it."""
    restarts: int = 3
    """How often to restart from the last checkpoint after a rank has died; for mpi, if Shoal started mpirun."""
    task_timeout: float | None = None
    """Replace a worker that is busy with one task for this many seconds (default: never)."""
    allow_mixed: bool = False
    """Accept workers whose versions or arithmetic differ, and give up reproducible results."""
    tensorboard: bool = True
    """Write TensorBoard event files."""

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        options = _json_object(self.engine_options)
        found = engines.engine_problems(self.engine, self.workers, options) + env_problems(self.env)
        found += name_problems(self.name) if self.name is not None else []
        found += validation.field_problems(
            self,
            at_least_one=(
                "steps", "iterations", "max_episode_steps", "step_limit", "checkpoint_every", "keep_checkpoints",
                "learner_threads",
            ),
            above_zero=("checkpoint_seconds", "task_timeout"),
            not_negative=("recreate_after", "restarts"),
        )  # fmt: skip
        if self.device not in ("cpu", "gpu"):
            found.append(f"device must be cpu or gpu, not {self.device}")
        if self.vector and self.recreate_after:
            found.append("recreate_after cannot be combined with vector: vector lanes are re-created regularly anyway")
        if not 0 <= self.seed <= MAX_SEED:
            found.append(f"seed must be in 0..{MAX_SEED}, not {self.seed}")
        for name, example in (("env_kwargs", '{"gravity": -5}'), ("engine_options", '{"placement": "pack"}')):
            text = getattr(self, name)
            if _json_object(text) is None:
                found.append(f"{name} must be a JSON object such as '{example}', not {text}")
        return found

    @property
    def env_spec(self) -> EnvSpec:
        """The environment, as workers make it."""
        return EnvSpec(
            self.env,
            json.loads(self.env_kwargs),
            self.max_episode_steps,
            self.recreate_after,
            self.step_limit,
            self.vector,
        )

    @property
    def goal(self) -> Goal:
        """When the run ends."""
        return Goal(self.steps, self.iterations)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
