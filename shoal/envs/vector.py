"""Native vector environments: many copies stepped by one call, from EnvPool or from an environment's own vector form.

They start the next episode by themselves, from a stream of random numbers that began when they were made. So an
episode follows from everything that its lane did since then, and not from a seed of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from shoal.envs.make import EnvSpec, registered
from shoal.errors import EnvironmentFault, MissingExtra, UsageError


class VectorEnv:
    """`len(seeds)` copies of an environment. An ended episode's next step is its reset, whatever the action."""

    def __init__(self, spec: EnvSpec, seeds: Sequence[int]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # both libraries warn of their own spaces, once per environment
                if spec.vector == "envpool":
                    self._env: Any = _envpool(spec, seeds)
                    self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
                    self._options = {}  # its seeds are fixed when it is made
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
            raise EnvironmentFault(f"{spec.id} as --vector {spec.vector} resets in mode {mode}; Shoal takes NEXT_STEP")

    def reset(self) -> np.ndarray:
        """First observations (width, ...)."""
        observations: np.ndarray = self._env.reset(**self._options)[0]
        return observations

    def step(self, actions: list[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Observations (width, ...), rewards, terminated, truncated (width,) after one step of all copies."""
        found = self._env.step(np.asarray(actions, self.action_space.dtype))
        return found[0], found[1], found[2], found[3]

    def close(self) -> None:
        """Free it."""
        self._env.close()


def _gymnasium(spec: EnvSpec, width: int) -> Any:
    record = registered(spec)
    if record.vector_entry_point is None:
        raise UsageError(f"{spec.id} has no vector form of its own. Leave out --vector, or try --vector envpool")
    if spec.max_episode_steps is not None:
        record.max_episode_steps = spec.max_episode_steps
    return gymnasium.make_vec(record, width, vectorization_mode="vector_entry_point", **spec.kwargs)


def _envpool(spec: EnvSpec, seeds: Sequence[int]) -> Any:
    try:
        import envpool
    except ImportError:
        raise MissingExtra(
            "--vector envpool needs a package. To install it, type: pip install 'shoal[envpool]'"
        ) from None
    name = spec.id.rpartition("/")[2]  # ALE/Pong-v5 is Pong-v5 there
    if name not in envpool.list_all_envs():
        raise UsageError(f"EnvPool has no environment {name}. Leave out --vector to use Gymnasium's")
    options = dict(spec.kwargs)
    if spec.max_episode_steps is not None:
        options["max_episode_steps"] = spec.max_episode_steps
    return envpool.make_gymnasium(name, num_envs=len(seeds), num_threads=1, seed=list(map(int, seeds)), **options)
