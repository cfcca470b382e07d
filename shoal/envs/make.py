"""Make environments from plain data."""

from __future__ import annotations

import dataclasses
import re
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypeAlias, TypedDict, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registered

from shoal.engines import user_code
from shoal.envs import names
from shoal.envs.wrappers import Wrapper
from shoal.errors import EnvironmentFault, MissingExtra, ShoalError, UsageError
from shoal.policies.observations import Flattener

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
    wrap: NotRequired[list[str]]
    code: NotRequired[dict[str, str]]
    info_keys: NotRequired[list[str]]


@dataclass(frozen=True)
class EnvSpec:
    """An environment by name. Plain data: it is sent to workers and stored with the run."""

    id: str
    """A Gymnasium id, `module:Env-v0` to import the module that registers it first, or `module:Class`."""
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
    wrap: list[str] = field(default_factory=list)
    """Wrappers to put around it, the innermost first: see `Wrapper`."""
    code: dict[str, str] = field(default_factory=dict)
    """Modules of the user, by name or file, and the digest that each must have wherever it is imported."""
    info_keys: list[str] = field(default_factory=list)
    """Keys of `info` whose numbers at the end of an episode are recorded, in addition to `is_success`."""

    def to_record(self) -> EnvRecord:
        return cast("EnvRecord", dataclasses.asdict(self))

    @staticmethod
    def from_record(record: EnvRecord) -> EnvSpec:
        return EnvSpec(**record)


_EXTRAS = {"box2d": "box2d", "mujoco": "mujoco"}
"""Word in Gymnasium's message about a missing package -> Shoal's extra that installs it."""


def make_env(spec: EnvSpec) -> Env:
    """Make an environment with its wrappers; observations that are no arrays are flattened to a vector.

    Gymnasium's TimeLimit and OrderEnforcing wrappers are omitted where they are outermost, since each costs a call per
    step: a lane enforces the limit itself (`time_limit`) and always resets first.
    """
    for module, digest in spec.code.items():
        user_code.require(module, digest)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium would recommend a newer version once per slot
            env = _bare(spec)
    except ShoalError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        extra = next((extra for name, extra in _EXTRAS.items() if name in str(error).lower()), "")
        install = f"Install it: pip install 'shoal[{extra}]'" if extra else str(error)
        raise MissingExtra(f"{spec.id} needs a package that is not installed. {install}") from None
    except gymnasium.error.Error as error:
        raise UsageError(f"{spec.id} cannot be made: {error}") from None
    except Exception as error:
        if spec.kwargs and isinstance(error, TypeError):
            raise UsageError(f"{spec.id} does not take --env-kwargs {spec.kwargs}: {error}") from error
        raise EnvironmentFault(f"{spec.id} raised {type(error).__name__} when it was made: {error}") from error
    for text in spec.wrap:
        env = _wrapped(env, text)
    return env if isinstance(env.observation_space, gymnasium.spaces.Box) else FlatObservation(env)


def _bare(spec: EnvSpec) -> Env:
    """Make an environment without the user's wrappers."""
    factory = names.factory_of(spec.id)
    if factory is not None:
        made = factory(**spec.kwargs)
        if not isinstance(made, gymnasium.Env):
            raise UsageError(f"{spec.id} made {type(made).__name__}, which is no gymnasium.Env")
        if spec.wrap and spec.max_episode_steps is not None:
            return gymnasium.wrappers.TimeLimit(made, spec.max_episode_steps)
        return made
    record = names.registered(spec.id)
    if not _keeps_time(spec, record):
        record.order_enforce = False
        record.max_episode_steps = None
    elif spec.max_episode_steps is not None:
        record.max_episode_steps = spec.max_episode_steps
    _calm(record)
    return gymnasium.make(record, disable_env_checker=True, **spec.kwargs)


def _wrapped(env: Env, text: str) -> Env:
    try:
        wrapped = Wrapper.parse(text).wrap(env)
    except ShoalError:
        raise
    except Exception as error:
        raise UsageError(f"--wrap {text} raised {type(error).__name__}: {error}") from error
    if not isinstance(wrapped, gymnasium.Env):
        raise UsageError(f"--wrap {text} made {type(wrapped).__name__}, which is no gymnasium.Env")
    return wrapped


class FlatObservation(gymnasium.ObservationWrapper[np.ndarray, Any, Any]):
    """Flattens observations that are no arrays."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.flattener = Flattener(env.observation_space)
        self.observation_space = self.flattener.flat

    def observation(self, observation: Any) -> np.ndarray:
        """Flatten one observation."""
        return self.flattener(observation)


def time_limit(spec: EnvSpec) -> int | None:
    """Steps after which a lane truncates an episode; None without a limit or if the environment enforces it itself."""
    if names.factory_of(spec.id) is not None:
        return None if spec.wrap else spec.max_episode_steps
    record = names.registered(spec.id)
    return None if _keeps_time(spec, record) else spec.max_episode_steps or record.max_episode_steps


def _keeps_time(spec: EnvSpec, record: Registered) -> bool:
    """Whether the environment enforces its time limit itself, because wrappers around it have to see the end."""
    return bool(record.additional_wrappers or spec.wrap)


_warned: set[str] = set()


def _calm(record: Registered) -> None:
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
