"""Settings of a run, except the algorithm's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from shoal import engines
from shoal.base import validation
from shoal.base.seeding import MAX_SEED
from shoal.engines import user_code
from shoal.engines.user_code import content_digest as digest
from shoal.envs.make import EnvSpec
from shoal.envs.names import env_problems, full_name
from shoal.envs.wrappers import users_modules, wrapper_problems
from shoal.runs.folder import name_problems
from shoal.runs.goal import Goal

_METRICS = ("episodes", "ep_rew_mean", "ep_len_mean", "success_rate", "mean_reward", "std_reward", "mean_ep_length")


@dataclass(frozen=True)
class Settings:
    """Settings of a run, except the algorithm's."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """Environment: a Gymnasium id, module:Env-v0 to import the module that registers it, or a class or function of
    your own as module:GridWorld or ./file.py:GridWorld."""
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
    wrap: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Wrapper around the environment, may be repeated, the innermost first: Gymnasium's by name, your own as
    module:Class; arguments after a colon, as in FrameStackObservation:4 (default: none)."""
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
    eval_every: int = 0
    """Evaluate the policy greedily each time this many environment steps have passed (0: never): writes
    eval/mean_reward and keeps the best policy in best.safetensors. Does not change what is learned."""
    eval_episodes: int = 20
    """Episodes of each of these evaluations, the same ones every time."""
    info_keys: tuple[str, ...] = ()
    """Keys of `info` whose numbers at the end of episodes become metrics, such as rollout/KEY, in addition to
    is_success, which becomes rollout/success_rate (default: none)."""
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

    def __post_init__(self) -> None:
        """Give files their whole path, so that the record of a run makes sense in every folder."""
        object.__setattr__(self, "env", full_name(self.env))
        object.__setattr__(self, "wrap", tuple(full_name(text) for text in self.wrap))

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        options = _json_object(self.engine_options)
        found = engines.engine_problems(self.engine, self.workers, options) + env_problems(self.env)
        found += name_problems(self.name) if self.name is not None else []
        found += validation.field_problems(
            self,
            at_least_one=(
                "steps", "iterations", "max_episode_steps", "step_limit", "checkpoint_every", "keep_checkpoints",
                "learner_threads", "eval_episodes",
            ),
            above_zero=("checkpoint_seconds", "task_timeout"),
            not_negative=("recreate_after", "restarts", "eval_every"),
        )  # fmt: skip
        found += [problem for text in self.wrap for problem in wrapper_problems(text)]
        if self.vector and self.wrap:
            found.append("wrap cannot be combined with vector: wrappers are for single environments")
        found += notebook_problems(self.env, self.users_modules, self.engine)
        if self.device not in ("cpu", "gpu"):
            found.append(f"device must be cpu or gpu, not {self.device}")
        taken = [key for key in self.info_keys if key in _METRICS]
        if taken:
            found.append(f"info_keys must not contain {', '.join(taken)}: metrics have these names already")
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
            list(self.wrap),
            {} if self.allow_mixed else {name: digest(user_code.load(name)) for name in self.users_modules},
            list(self.info_keys),
        )

    @property
    def users_modules(self) -> list[str]:
        """Modules of the user that the environment and its wrappers come from, by name or file."""
        return users_modules(self.env, self.wrap)

    @property
    def goal(self) -> Goal:
        """When the run ends."""
        return Goal(self.steps, self.iterations)


def notebook_problems(env: str, modules: Sequence[str], engine: str) -> list[str]:
    """Describe why the workers of an engine would not find an environment that is defined in a notebook."""
    if engine == "serial" or user_code.MAIN not in modules:
        return []
    return [
        f"{env} is defined in a notebook cell or an interactive session, where only the engine serial finds it. "
        f"For other engines, write its cell to a file with %%writefile my_env.py as its first line, and import it from "
        f"there"
    ]


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
