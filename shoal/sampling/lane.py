"""A lane of single environments: `width` of them stepped in lockstep behind one batched forward pass.

The width is part of the task, because a row in a batch has different bits than the same row alone; only where each row
has its own weights may a lane get narrower. This module and `vector_lane` are where environments are stepped.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from shoal.envs.make import Env, EnvSpec, make_env, observation_dtype, time_limit
from shoal.errors import EnvironmentFault
from shoal.policies.actions import Distribution
from shoal.policies.policy import Actor
from shoal.sampling.lane_address import LaneAddress, Ledger
from shoal.sampling.slots import Slots

NOISE_STEPS = 128
"""Exploration noise is drawn for this many steps at once. Part of the task: changing it changes every run."""

_KEEP_SPECS = 4  # different environments of which a worker keeps idle instances


class StepObserver(Protocol):
    """Receives every step of a lane: a `LaneRecorder` keeps everything, a `Tally` only sums."""

    def step(self, observations: np.ndarray, actions: np.ndarray, rewards: list[float]) -> None:
        """Take in one step of all slots."""

    def end(self, time: int, slot: int, terminated: bool, info: Mapping[str, Any]) -> None:
        """Take in the end of an episode, whose last step was at this time and returned this `info`."""


class IdleEnvs:
    """Environments that wait for the next lane: making one costs far more than resetting it."""

    def __init__(self) -> None:
        self._envs: OrderedDict[str, list[Env]] = OrderedDict()

    def borrow(self, spec: EnvSpec, count: int) -> list[Env]:
        """Take idle environments, and make those that are missing."""
        key = _key(spec)
        idle = self._envs.setdefault(key, [])
        self._envs.move_to_end(key)
        while len(self._envs) > _KEEP_SPECS:
            for env in self._envs.popitem(last=False)[1]:
                env.close()
        return [idle.pop() if idle else make_env(spec) for _ in range(count)]

    def give_back(self, spec: EnvSpec, envs: Sequence[Env]) -> None:
        """Keep environments for the next lane; close those that must be re-created, or whose kind is no longer kept."""
        idle = None if spec.recreate_after else self._envs.get(_key(spec))
        for env in envs:
            if idle is None:
                env.close()
            else:
                idle.append(env)

    def counts(self) -> list[int]:
        """Count the idle environments of each kind."""
        return list(map(len, self._envs.values()))

    def clear(self) -> None:
        """Forget all environments."""
        self._envs.clear()


def _key(spec: EnvSpec) -> str:
    return json.dumps(spec.to_record(), sort_keys=True)


class Lane(Slots):
    """A lane with one environment per slot."""

    def __init__(self, address: LaneAddress, idle: IdleEnvs, remembered: int = 0) -> None:
        super().__init__(address, remembered)
        self.limit = time_limit(self.spec)
        self.idle = idle
        self.envs = idle.borrow(self.spec, self.width)
        self.allocate(self.envs[0].observation_space)

    def begin(self, slot: int, episode: int) -> None:
        """Start an episode in a slot, from the seed of that episode."""
        age = self._age(slot, episode)
        if self.spec.recreate_after and age and age % self.spec.recreate_after == 0:
            self.envs[slot].close()
            self.envs[slot] = make_env(self.spec)
        self.episodes[slot], self.begun[slot], self.returns[slot] = episode, self.clock, 0.0
        self.memory[slot] = 0.0
        try:
            self.observations[slot] = self.envs[slot].reset(seed=self.seed(slot, episode))[0]
        except Exception as error:
            raise self.fault(slot, error) from error

    def _age(self, slot: int, episode: int) -> int:
        """Count the episodes of a slot before this one."""
        return episode

    def rebuild(self, ledger: Ledger, distribution: Distribution) -> None:
        """Bring every slot to the state in the ledger, by replaying its actions since the reset."""
        for slot in range(self.width):
            entry = ledger[str(slot)]
            self.begin(slot, entry["episode"])
            env = self.envs[slot]
            for step, action in enumerate(distribution.to_env(entry["actions"])):
                self.begun[slot] = self.clock - step - 1
                try:
                    observation, reward, terminated, truncated, _ = env.step(action)
                except Exception as error:
                    raise self.fault(slot, error) from error
                if terminated or truncated:
                    raise EnvironmentFault(self._not_deterministic(slot, step, len(entry["actions"])))
                self.observations[slot] = observation
                self.returns[slot] += float(reward)

    def play(
        self,
        act: Actor,
        distribution: Distribution,
        rng: np.random.Generator | None,
        following: Callable[[int], int | None],
        observer: StepObserver,
        steps: int | None = None,
        narrowing: bool = False,
    ) -> int:
        """Step the slots together, for `steps` steps or until every slot is left; return the number of steps.

        `following(slot)` names the episode to start where one has ended, or None to leave the slot, which then keeps
        its last observation. With `narrowing` this returns once half of the slots are left, so that the caller can
        `narrow` the lane. Without `rng` actions are greedy.
        """
        ways = [self._way(slot) for slot in range(self.width)]
        chunk = NOISE_STEPS if steps is None else min(steps, NOISE_STEPS)
        time, playing = 0, self.width - self.episodes.count(-1)
        while playing and time != steps:
            if rng is not None and time % chunk == 0:
                noise = distribution.noise(rng, chunk, self.width)
            acted_on = self.observations
            actions = act(acted_on, None if rng is None else noise[time % chunk], self.memory)
            env_actions = distribution.to_env(actions)
            self.clock = clock = self.clock + 1
            rows: list[Any] = []
            rewards: list[float] = []
            ended: list[tuple[int, bool, Mapping[str, Any]]] = []
            try:
                for (step, due), action in zip(ways, env_actions, strict=True):
                    observation, reward, terminated, truncated, info = step(action)
                    rewards.append(float(reward))
                    if terminated or truncated or clock == due:
                        ended.append((len(rows), bool(terminated), info))
                    rows.append(observation)
                self.observations = self._stacked(rows)
            except Exception as error:
                raise self.fault(self._culprit(rows), error) from error
            observer.step(acted_on, actions, rewards)
            time += 1
            self.taken += playing
            for slot, terminated, info in ended:
                observer.end(time - 1, slot, terminated, info)
                episode = following(slot)
                if episode is None:
                    playing -= 1
                    self.episodes[slot] = -1
                else:
                    self.begin(slot, episode)
                ways[slot] = self._way(slot)
            if time % NOISE_STEPS == 0 or time == steps:
                self._check_ending()
            if narrowing and 2 * playing <= self.width:
                break
        return time

    def narrow(self) -> list[int]:
        """Drop the slots that were left; return the numbers of those that remain, in order."""
        kept = [slot for slot in range(self.width) if self.episodes[slot] >= 0]
        self.idle.give_back(self.spec, [env for slot, env in enumerate(self.envs) if self.episodes[slot] < 0])
        self.width = len(kept)
        self.envs = [self.envs[slot] for slot in kept]
        self.observations, self.memory = self.observations[kept], self.memory[kept]
        self.episodes, self.begun = [self.episodes[slot] for slot in kept], [self.begun[slot] for slot in kept]
        self.returns = [self.returns[slot] for slot in kept]
        return kept

    def _way(self, slot: int) -> tuple[Callable[[Any], tuple[Any, ...]], int]:
        """Return the step function of a slot, and the clock time of its truncation (-1: none)."""
        if self.episodes[slot] >= 0:
            return self.envs[slot].step, self._due(slot)
        answer: tuple[Any, ...] = (self.observations[slot].copy(), 0.0, False, False, {})
        return lambda action: answer, -1

    def _stacked(self, rows: list[Any]) -> np.ndarray:
        """Stack observations. One call for all of them costs a third of one assignment for each."""
        shape, dtype = self.observations.shape, self.observations.dtype
        if len(shape) == 1:
            return np.array(rows, dtype)
        return np.concatenate(rows, dtype=dtype, casting="unsafe").reshape(shape)

    def _culprit(self, rows: list[Any]) -> int:
        """Find the slot at fault: the one after the last row, or the one whose row has a different shape."""
        if len(rows) < self.width:
            return len(rows)
        shape = self.observations.shape[1:]
        return next((slot for slot, row in enumerate(rows) if np.shape(row) != shape), self.width - 1)

    def _due(self, slot: int) -> int:
        """Compute the clock time at which the time limit truncates a slot's episode (-1: never)."""
        return self.begun[slot] + self.limit if self.limit else -1

    def close(self) -> None:
        """Give the environments back for the next lane."""
        self.idle.give_back(self.spec, self.envs)

    def _not_deterministic(self, slot: int, step: int, length: int) -> str:
        return (
            f"the environment is not deterministic under its seed: an episode of {length} steps so far ended at step "
            f"{step} when its actions were replayed, in {self.where(slot, self.episodes[slot], step)}. "
            f"To find out more, run: shoal check-env {self.spec.id}"
        )

    def _check_ending(self) -> None:
        playing = [slot for slot in range(self.width) if self.episodes[slot] >= 0]
        slot = min(playing, key=self.begun.__getitem__, default=0)
        length = self.clock - self.begun[slot]
        if not playing or length < self.spec.step_limit:
            return
        where = self.where(slot, self.episodes[slot], length)
        raise EnvironmentFault(
            f"an episode does not end: {where}. Truncate episodes with --max-episode-steps N, "
            f"or allow longer ones with --step-limit N (now {self.spec.step_limit:,})"
        )


# One episode without a lane -------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The answer of an environment to a reset or a step, in the types that lanes record."""

    observation: np.ndarray
    reward: float
    terminated: bool
    truncated: bool


def play_alone(
    env: Env, spec: EnvSpec, seed: int, actions: Sequence[Any], pause: Callable[[int], None]
) -> Iterator[Answer]:
    """Play one episode with given actions: yield the answer to its reset, then to each step up to its end.

    `pause(step)` is called before each step, from a frame that has `env`, `action` and `observation`: for a debugger.
    """
    limit, space = time_limit(spec), env.observation_space
    dtype, shape = observation_dtype(space), space.shape or ()
    observation, _ = env.reset(seed=seed)
    yield Answer(np.array(observation, dtype).reshape(shape), 0.0, False, False)
    for step, action in enumerate(actions):
        pause(step)
        observation, reward, terminated, truncated, _info = env.step(action)
        truncated = bool(truncated) or step + 1 == limit
        yield Answer(np.array(observation, dtype).reshape(shape), float(reward), bool(terminated), truncated)
        if terminated or truncated:
            return
