"""Environments by name: how a worker makes one, and what the head has to know of it."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import re
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from shoal.base.trees import Tree
from shoal.engines.functions import refuse_module
from shoal.errors import EnvironmentFault, MissingExtra, ShoalError, UsageError
from shoal.policies import actions


@dataclass(frozen=True)
class EnvSpec:
    """An environment by name. Plain data: it travels to workers and is stored with the run."""

    id: str
    """A Gymnasium id, also as `module:Env-v0`, which imports the module first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; None keeps the environment's own limit."""
    recreate_after: int = 0
    """Make the environment anew after this many episodes, for those that leak memory; 0 never does."""
    step_limit: int = 100_000
    """An episode longer than this is an error: the environment never ends."""
    vector: str | None = None
    """Step lanes as one native vector environment: "envpool", or "gymnasium" for the environment's own vector form."""

    def to_tree(self) -> Tree:
        """Plain data."""
        return dataclasses.asdict(self)


def make_env(spec: EnvSpec) -> gymnasium.Env[Any, Any]:
    """The environment, with Dict, Tuple and Discrete observations flattened into one row of numbers.

    Gymnasium's wrappers for the time limit and the order of calls are left out where they are outermost: a lane keeps
    the time itself (`time_limit`) and always resets first, and each wrapper costs a call per step.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on newer versions of an environment would come once per slot
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
                f"the observation space {space} of {spec.id} is not supported: it has no fixed size. "
                f"Shoal takes Box, Discrete, and Dict or Tuple of these"
            )
        return gymnasium.wrappers.FlattenObservation(env)
    return env


def time_limit(spec: EnvSpec) -> int | None:
    """Steps after which a lane cuts an episode off; None where there is no limit or the environment keeps it itself."""
    record = registered(spec)
    if record.additional_wrappers:
        return None
    return spec.max_episode_steps or record.max_episode_steps


# Namespaces whose module nobody wants to spell as module:Env-v0
_REGISTERED_BY = {"ALE": "ale_py", "shoal": "shoal.envs.own"}


def _module_and_id(name: str) -> tuple[str, str]:
    """What to import so that an environment is registered (or nothing), and its plain id."""
    module, _, plain = name.rpartition(":")
    return module or _REGISTERED_BY.get(plain.partition("/")[0], ""), plain


def registered(spec: EnvSpec) -> gymnasium.envs.registration.EnvSpec:
    """A copy of Gymnasium's own record of an environment."""
    module, plain = _module_and_id(spec.id)
    if module:
        if module not in _REGISTERED_BY.values():
            refuse_module(module)
        importlib.import_module(module)
    return copy.deepcopy(gymnasium.spec(plain))


_said: set[str] = set()


def _calm(record: gymnasium.envs.registration.EnvSpec) -> None:
    """MuJoCo repeats its warnings for every environment and logs them in the working folder; ALE prints a banner."""
    maker = str(record.entry_point)
    try:
        if "mujoco" in maker:
            import mujoco

            mujoco.set_mju_user_warning(_warn_once)
        elif maker.startswith("ale_py"):
            import ale_py

            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    except ImportError:
        return  # Gymnasium says what to install when the environment is made


def _warn_once(message: str) -> None:
    kind = re.split(r"\d", message)[0]  # the numbers differ each time
    if "deprecated" in message or kind in _said:  # deprecated parts of Gymnasium's models are not the user's to mend
        return
    _said.add(kind)
    print(f"MuJoCo warns: {message}", file=sys.stderr)


def observation_dtype(space: gymnasium.Space[Any]) -> np.dtype[Any]:
    """As observations are kept and sent: as they are, except that float64 is cut to the float32 that networks use."""
    dtype = np.dtype(space.dtype)
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def describe(spec: Tree) -> dict[str, Any]:
    """Task: the spaces of an environment, as plain data, found out on a worker."""
    parsed = EnvSpec(**spec)
    if parsed.vector:
        from shoal.envs.vector import VectorEnv

        env: Any = VectorEnv(parsed, [0])
    else:
        env = make_env(parsed)
    try:
        space = env.observation_space
        return {
            "shape": list(space.shape or ()),
            "dtype": observation_dtype(space).str,
            "head": actions.to_tree(actions.head_for(env.action_space)),
        }
    finally:
        env.close()


def env_problems(name: str) -> list[str]:
    """What is wrong with an environment's name, found without making it."""
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
        hint += "" if module else " If a module of yours registers it, name it as module:Env-v0"
        return [f"there is no environment {plain!r}. {error}{hint}"]
    except ModuleNotFoundError as error:
        if error.name == "ale_py":
            return [f"{plain} needs the Atari emulator. To install it, type: pip install 'shoal[atari]'"]
        return [f"the module {module} of the environment {plain} cannot be imported: {error}"]
    except Exception as error:  # whatever the user's module raises when it is imported
        return [f"the module {module} of the environment {plain} cannot be imported: {type(error).__name__}: {error}"]
    return []
