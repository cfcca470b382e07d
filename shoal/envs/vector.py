"""Native vector environments: many copies stepped by one call, from EnvPool or a registered `vector_entry_point`.

They start the next episode automatically, with random numbers from a stream that began when they were made. So an
episode depends on everything its lane did since then, not on an episode seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from shoal.envs import names
from shoal.envs.make import EnvSpec
from shoal.errors import EnvironmentFault, MissingExtra, UsageError


class VectorEnv:
    """`len(seeds)` copies of an environment. The step after an episode's end is a reset and ignores the action."""

    def __init__(self, spec: EnvSpec, seeds: Sequence[int]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # both libraries warn about their own spaces, once per environment
                if spec.vector == "envpool":
                    self._env: Any = _envpool(spec, seeds)
                    self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
                    self._options: dict[str, int] = {}  # EnvPool takes its seeds when it is made
                else:
                    self._env = _gymnasium(spec, len(seeds))
                    self.observation_space = self._env.single_observation_space
                    self.action_space = self._env.single_action_space
                    self._options = {"seed": int(seeds[0])}
        except gymnasium.error.Error as error:
            raise UsageError(f"{spec.id} cannot be made as --vector {spec.vector}: {error}") from None
        except TypeError as error:
            raise UsageError(f"{spec.id} as --vector {spec.vector} does not take {spec.kwargs}: {error}") from error
        mode = self._env.metadata.get("autoreset_mode", gymnasium.vector.AutoresetMode.NEXT_STEP)
        if mode != gymnasium.vector.AutoresetMode.NEXT_STEP:
            raise EnvironmentFault(
                f"{spec.id} as --vector {spec.vector} has the autoreset mode {mode}; Shoal supports only NEXT_STEP"
            )

    def reset(self) -> np.ndarray:
        """Start the first episodes and return their observations (width, ...)."""
        observations: np.ndarray = self._env.reset(**self._options)[0]
        return observations

    def step(self, actions: list[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all copies. Returns observations (width, ...), rewards, terminated, truncated (width,), and info."""
        found = self._env.step(np.asarray(actions, self.action_space.dtype))
        return found[0], found[1], found[2], found[3], found[4]

    def close(self) -> None:
        self._env.close()


def _gymnasium(spec: EnvSpec, width: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    factory = names.factory_of(spec.id)
    if factory is not None:
        made = factory(num_envs=width, **spec.kwargs)
        if not isinstance(made, gymnasium.vector.VectorEnv):
            raise UsageError(f"{spec.id} made {type(made).__name__}, which is no gymnasium.vector.VectorEnv")
        return made
    record = names.registered(spec.id)
    if record.vector_entry_point is None:
        raise UsageError(f"{spec.id} registers no vector_entry_point. Omit --vector, or try --vector envpool")
    if spec.max_episode_steps is not None:
        record.max_episode_steps = spec.max_episode_steps
    return gymnasium.make_vec(record, width, vectorization_mode="vector_entry_point", **spec.kwargs)


def _envpool(spec: EnvSpec, seeds: Sequence[int]) -> Any:
    try:
        import envpool
    except ImportError:
        raise MissingExtra(
            "--vector envpool needs a package that is not installed. Install it: pip install 'shoal[envpool]'"
        ) from None
    name = spec.id.rpartition("/")[2]  # EnvPool calls ALE/Pong-v5 Pong-v5
    if name not in envpool.list_all_envs():
        raise UsageError(f"EnvPool has no environment {name}. Omit --vector to use Gymnasium's")
    options = dict(spec.kwargs)
    if spec.max_episode_steps is not None:
        options["max_episode_steps"] = spec.max_episode_steps
    return envpool.make_gymnasium(name, num_envs=len(seeds), num_threads=1, seed=list(map(int, seeds)), **options)
