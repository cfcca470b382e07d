"""What happens in a lane: where its slots are, and the record of a stretch of steps."""

from __future__ import annotations

import traceback
from typing import Any

import gymnasium
import numpy as np

from shoal.base import seeding
from shoal.base.moments import Moments
from shoal.base.trees import Tree
from shoal.envs.make import EnvSpec, observation_dtype
from shoal.errors import EnvironmentFault
from shoal.policies.policy import Policy

NOISE_STEPS = 128
"""Noise for sampling is drawn for this many steps at once. Part of the task: changing it changes every run."""


def episode_seed(place: Tree, slot: int, episode: int) -> int:
    """What the environment of a slot is reset with."""
    return seeding.integer(place["seed"], place["purpose"], place["lane"], slot, episode)


class Slots:
    """`width` slots. Slot s is in episode `episodes[s]` and will act on `observations[s]`; -1 means in none."""

    observations: np.ndarray

    def __init__(self, place: Tree) -> None:
        self.place, self.width = place, place["width"]
        self.spec = EnvSpec(**place["env"])
        self.clock = 0
        self.taken = 0
        self.episodes = [-1] * self.width
        self.begun = [0] * self.width  # by the clock
        self.returns = [0.0] * self.width  # of the running episodes, before this task
        self.memory = np.zeros((self.width, 0), np.float32)  # what a recurrent policy remembers in each slot

    def see(self, space: gymnasium.Space[Any]) -> None:
        """Make room for observations (width, ...) of a space."""
        self.observations = np.zeros((self.width, *(space.shape or ())), observation_dtype(space))

    def seed(self, slot: int, episode: int) -> int:
        """What the environment of a slot is reset with."""
        return episode_seed(self.place, slot, episode)

    def where(self, slot: int, episode: int, step: int) -> str:
        """How a message names one step."""
        seed, lane = self.seed(slot, episode), self.place["lane"]
        return f"{self.spec.id}, lane {lane}, slot {slot}, episode {episode} (reset seed {seed}), step {step}"

    def raised(self, slot: int, error: Exception) -> EnvironmentFault:
        """What to raise when the environment of a slot has raised an error."""
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        trace = "".join(traceback.format_exception(type(error), error, below))
        where = self.where(slot, self.episodes[slot], max(self.clock - self.begun[slot] - 1, 0))
        return EnvironmentFault(f"the environment raised {type(error).__name__}: {error}\nin {where}\n\n{trace}")


class Record:
    """What happened in a lane: T steps of W slots, and K ends of episodes in order of time, then slot.

    observations (T+1, W, ...)   what was acted on; the last row is what the next step would act on
    actions      (T, W, numbers)
    rewards      (T, W) float32
    steps        (W,)            how many of the T steps each slot took; a slot that is left stays left
    ends         (K, 2)          time and slot of the last step of each episode that ended
    terminated   (K,) bool       True: the environment ended it. False: it was cut off (truncated)
    finals       (K, ...)        the observation after that step, which `observations` has no place for
    returns, lengths, episodes   (K,) of those episodes, whole
    skipped      (S, 2)          time and slot of steps that a native vector environment spent on a reset
    moments                      count, mean and squared deviations of the observations acted on
    """

    def __init__(self, lane: Slots) -> None:
        self.lane = lane
        self.clock = lane.clock  # when this record begins
        self.begun_at = [
            (episode, lane.clock - begun) for episode, begun in zip(lane.episodes, lane.begun, strict=True)
        ]
        self.observations: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []
        self.rewards: list[list[float]] = []
        self.ends: list[tuple[int, int]] = []
        self.terminated: list[bool] = []
        self.finals: list[np.ndarray] = []
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.episodes: list[int] = []
        self.skipped: list[tuple[int, int]] = []

    def step(self, observations: np.ndarray, actions: np.ndarray, rewards: list[float]) -> None:
        """The slots took a step: what they acted on, what they did, and what it paid."""
        self.observations.append(observations)
        self.actions.append(actions)
        self.rewards.append(rewards)

    def end(self, time: int, slot: int, terminated: bool) -> None:
        """An episode ended in a slot; call before the next one begins there."""
        lane = self.lane
        self.ends.append((time, slot))
        self.terminated.append(terminated)
        self.finals.append(lane.observations[slot].copy())
        self.returns.append(self._return(slot))
        self.lengths.append(lane.clock - lane.begun[slot])
        self.episodes.append(lane.episodes[slot])

    def _return(self, slot: int) -> float:
        """Sum of a slot's rewards since its episode began; added up in order of time, wherever tasks were cut."""
        lane = self.lane
        total = lane.returns[slot]
        for row in self.rewards[max(lane.begun[slot] - self.clock, 0) :]:
            total += row[slot]  # not `sum`, which newer Pythons compensate: `rebuild` adds one by one as well
        return total

    def tree(self, policy: Policy, time: int) -> Tree:
        """Plain data, checked for numbers that are not finite."""
        lane = self.lane
        lane.returns = [self._return(slot) for slot in range(lane.width)]
        observations = np.stack([*self.observations, lane.observations])
        rewards = np.array(self.rewards, np.float32).reshape(time, lane.width)
        ends = np.array(self.ends, np.int32).reshape(-1, 2)
        steps = np.full(lane.width, time, np.int32)
        for slot in range(lane.width):
            if lane.episodes[slot] < 0:
                last = [when for when, where in self.ends if where == slot]
                steps[slot] = last[-1] + 1 if last else 0
        self._check_finite("reward", rewards)
        self._check_finite("observation", observations)
        tree: Tree = {
            "observations": observations,
            "actions": np.stack(self.actions).astype(policy.head.action_dtype, copy=False),
            "rewards": rewards,
            "steps": steps,
            "ends": ends,
            "terminated": np.array(self.terminated, bool),
            "finals": np.array(self.finals, observations.dtype).reshape(-1, *observations.shape[2:]),
            "returns": np.array(self.returns, np.float64),
            "lengths": np.array(self.lengths, np.int64),
            "episodes": np.array(self.episodes, np.int64),
            "skipped": np.array(self.skipped, np.int32).reshape(-1, 2),
        }
        self._check_finite("final observation", tree["finals"])
        if policy.normalise:
            acted_on = policy.numbers(observations[:-1])
            real = np.arange(time)[:, None] < steps
            real[tuple(tree["skipped"].T)] = False
            rows = [acted_on[real[:, slot], slot] for slot in range(lane.width)]
            tree["moments"] = Moments.of(np.concatenate(rows)).to_tree()
        return tree

    def _check_finite(self, what: str, values: np.ndarray) -> None:
        if values.dtype.kind != "f" or np.isfinite(values.sum()) or np.isfinite(values).all():
            return
        at = np.argwhere(~np.isfinite(values))[0].tolist()
        # A final observation is listed by end; everything else by time and slot.
        time, slot = self.ends[at[0]] if what == "final observation" else (at[0], at[1])
        before = [end for end, where in self.ends if where == slot and end < time]
        first_episode, first_step = self.begun_at[slot]
        step = time - before[-1] - 1 if before else first_step + time
        raise EnvironmentFault(
            f"the environment returned the {what} {values[tuple(at)]}\n"
            f"in {self.lane.where(slot, first_episode + len(before), step)}. "
            f"Nothing was learned from it. Look at the environment with that seed, or clip what it returns"
        )
