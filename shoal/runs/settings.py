"""Settings of a run: everything but the algorithm's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from shoal import engines
from shoal.base import validation
from shoal.base.seeding import MAX_SEED
from shoal.envs.make import EnvSpec, env_problems
from shoal.runs.folder import check_name
from shoal.runs.track.console import Goal


@dataclass(frozen=True)
class Settings:
    """Everything about a run but the algorithm's own settings."""

    env: tyro.conf.Positional[str]
    """Environment: a Gymnasium id, or module:Env-v0 to import the module first."""
    steps: Annotated[int, tyro.conf.arg(aliases=["-n", "--total-timesteps"])] = 100_000
    """Environment steps to learn from (at least)."""
    iterations: int | None = None
    """Stop after this many iterations instead."""
    seed: int = 0
    """Everything random follows from it."""
    engine: str = "processes"
    """Who runs the environments: serial, processes, mpi, ray or redis; ray and redis also with ://HOST:PORT. Does not
    change the result."""
    workers: int | None = None
    """How many workers; one per core unless told. For redis: how many to wait for. Does not change the result."""
    engine_options: str = "{}"
    """Options of the engine, as JSON; for ray: placement (spread or pack), num_cpus, resources, runtime_env."""
    env_kwargs: str = "{}"
    """Keyword arguments for the environment, as JSON."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; the environment's own limit unless told."""
    step_limit: int = 100_000
    """An episode longer than this is an error: the environment never ends."""
    recreate_after: int = 0
    """Make environments anew after this many episodes, for those that leak memory."""
    vector: Literal["envpool", "gymnasium"] | None = None
    """Step lanes as one native vector environment: EnvPool's, or the environment's own vector form. Another
    implementation of the environment, so another result; equal on every engine all the same."""
    runs: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """Name of this run; algorithm, environment and a number unless told."""
    checkpoint_every: int = 50
    """Iterations between checkpoints, at most."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints, at most."""
    keep_checkpoints: int = 3
    """How many checkpoints to keep."""
    learner_threads: int | None = None
    """Threads of the learner. Changes the last bits, so it is kept with the run; chosen by network size unless told."""
    restarts: int = 3
    """How often to start again from the last checkpoint after a rank died; for mpi, where Shoal started mpirun."""
    task_timeout: float | None = None
    """Seconds after which a worker that is still busy with one task is replaced; never unless told."""
    allow_mixed: bool = False
    """Accept workers whose versions or arithmetic differ, and give up equal results."""
    tensorboard: bool = True
    """Write TensorBoard files."""

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        options = _json_object(self.engine_options)
        found = engines.engine_problems(self.engine, self.workers, options) + env_problems(self.env)
        found += check_name(self.name) if self.name is not None else []
        found += validation.field_problems(
            self,
            at_least_one=(
                "steps", "iterations", "max_episode_steps", "step_limit", "checkpoint_every", "keep_checkpoints",
                "learner_threads",
            ),
            above_zero=("checkpoint_seconds", "task_timeout"),
            not_negative=("recreate_after", "restarts"),
        )  # fmt: skip
        if self.vector and self.recreate_after:
            found.append("recreate_after does not go with vector: vector lanes are made anew by themselves")
        if not 0 <= self.seed <= MAX_SEED:
            found.append(f"seed must be in 0..{MAX_SEED}, not {self.seed}")
        for name, example in (("env_kwargs", '{"gravity": -5}'), ("engine_options", '{"placement": "pack"}')):
            text = getattr(self, name)
            if _json_object(text) is None:
                found.append(f"{name} must be a JSON object such as '{example}', not {text}")
        return found

    @property
    def env_spec(self) -> EnvSpec:
        """The environment."""
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
        """When to stop."""
        return Goal(self.steps, self.iterations)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
