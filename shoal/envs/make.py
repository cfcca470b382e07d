"""Make environments by name, and check a name before anything is made."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import re
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict, cast

import gymnasium
import numpy as np

from shoal.engines.functions import refuse_module
from shoal.errors import EnvironmentFault, MissingExtra, ShoalError, UsageError

Env: TypeAlias = gymnasium.Env[Any, Any]
"""A single environment, whatever its observations and actions are."""


class EnvRecord(TypedDict):
    """`EnvSpec` as plain data, in tasks and in saved policies. The fields are those of `EnvSpec`."""

    id: str
    kwargs: dict[str, Any]
    max_episode_steps: int | None
    recreate_after: int
    step_limit: int
    vector: str | None


@dataclass(frozen=True)
class EnvSpec:
    """An environment by name. Plain data: it is sent to workers and stored with the run."""

    id: str
    """A Gymnasium id, or `module:Env-v0` to import the module that registers it first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps (default: the environment's own limit)."""
    recreate_after: int = 0
    """Re-create the environment after this many episodes, for those that leak memory (0: never)."""
    step_limit: int = 100_000
    """Raise an error if an episode is longer than this: it would probably never end."""
    vector: str | None = None
    """Step each lane as one native vector environment: "envpool", or "gymnasium" for the `vector_entry_point` that the
    environment registers."""

    def to_record(self) -> EnvRecord:
        return cast("EnvRecord", dataclasses.asdict(self))

    @staticmethod
    def from_record(record: EnvRecord) -> EnvSpec:
        return EnvSpec(**record)


def make_env(spec: EnvSpec) -> Env:
    """Make an environment, with Dict, Tuple and Discrete observations flattened to a vector.

    Gymnasium's TimeLimit and OrderEnforcing wrappers are omitted where they are outermost, since each costs a call per
    step: a lane enforces the limit itself (`time_limit`) and always resets first.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium would recommend a newer version once per slot
            record = registered(spec)
            lean = not record.additional_wrappers
            if lean:
                record.order_enforce = False
                record.max_episode_steps = None
            elif spec.max_episode_steps is not None:
                record.max_episode_steps = spec.max_episode_steps
            _calm(record)
            env = gymnasium.make(record, disable_env_checker=True, **spec.kwargs)
    except ShoalError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtra(f"{spec.id} needs a package that is not installed: {error}") from None
    except gymnasium.error.Error as error:
        raise UsageError(f"{spec.id} cannot be made: {error}") from None
    except Exception as error:
        if spec.kwargs and isinstance(error, TypeError):
            raise UsageError(f"{spec.id} does not take --env-kwargs {spec.kwargs}: {error}") from error
        raise EnvironmentFault(f"{spec.id} raised {type(error).__name__} when it was made: {error}") from error
    space = env.observation_space
    if not isinstance(space, gymnasium.spaces.Box):
        flat = gymnasium.spaces.utils.flatten_space(space)
        if not isinstance(flat, gymnasium.spaces.Box):
            raise UsageError(
                f"the observation space {space} of {spec.id} is not supported, because its size is not fixed. "
                f"Supported spaces: Box, Discrete, and Dict or Tuple of these"
            )
        return gymnasium.wrappers.FlattenObservation(env)
    return env


def time_limit(spec: EnvSpec) -> int | None:
    """Steps after which a lane truncates an episode; None without a limit or if the environment enforces it itself."""
    record = registered(spec)
    if record.additional_wrappers:
        return None
    return spec.max_episode_steps or record.max_episode_steps


# Namespaces that need no module: prefix, and the module that registers their environments
_REGISTERED_BY = {"ALE": "ale_py", "shoal": "shoal.envs.builtin"}


def _module_and_id(name: str) -> tuple[str, str]:
    """Split a name into the module to import first ("" for none) and the plain Gymnasium id."""
    module, _, plain = name.rpartition(":")
    return module or _REGISTERED_BY.get(plain.partition("/")[0], ""), plain


def registered(spec: EnvSpec) -> gymnasium.envs.registration.EnvSpec:
    """Return a copy of Gymnasium's spec of an environment."""
    module, plain = _module_and_id(spec.id)
    if module:
        if module not in _REGISTERED_BY.values():
            refuse_module(module)
        importlib.import_module(module)
    return copy.deepcopy(gymnasium.spec(plain))


_warned: set[str] = set()


def _calm(record: gymnasium.envs.registration.EnvSpec) -> None:
    """Silence MuJoCo, which repeats its warnings per environment and logs to the working folder, and ALE's banner."""
    maker = str(record.entry_point)
    try:
        if "mujoco" in maker:
            import mujoco

            mujoco.set_mju_user_warning(_warn_once)
        elif maker.startswith("ale_py"):
            import ale_py

            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    except ImportError:
        return  # making the environment raises an error that names the package to install


def _warn_once(message: str) -> None:
    kind = re.split(r"\d", message)[0]  # the numbers differ each time
    if "deprecated" in message or kind in _warned:  # users cannot fix deprecated parts of Gymnasium's models
        return
    _warned.add(kind)
    print(f"MuJoCo warns: {message}", file=sys.stderr)


def observation_dtype(space: gymnasium.Space[Any]) -> np.dtype[Any]:
    """Dtype in which observations are stored and sent: the space's own, but float32 (as networks use) for float64."""
    dtype = np.dtype(space.dtype)
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def env_problems(name: str) -> list[str]:
    """Describe what is wrong with an environment's name, without making the environment."""
    module, plain = _module_and_id(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if module:
                importlib.import_module(module)
            gymnasium.spec(plain)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(plain, gymnasium.registry, n=2, cutoff=0.7)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        hint += "" if module else " If your own module registers it, use module:Env-v0"
        return [f"there is no environment {plain!r}. {error}{hint}"]
    except ModuleNotFoundError as error:
        if error.name == "ale_py":
            return [f"{plain} needs the Atari emulator. Install it: pip install 'shoal[atari]'"]
        return [f"the module {module} of the environment {plain} cannot be imported: {error}"]
    except Exception as error:  # importing the user's module may raise anything
        return [f"the module {module} of the environment {plain} cannot be imported: {type(error).__name__}: {error}"]
    return []
