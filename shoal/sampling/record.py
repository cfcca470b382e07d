"""The record of what happened in a lane, and its recorder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import numpy as np

from shoal.base.moments import Moments, MomentsRecord
from shoal.errors import EnvironmentFault
from shoal.policies.policy import Policy
from shoal.sampling.slots import Slots

SUCCESS = "is_success"
"""The key of `info` by which environments with a goal report whether it was reached."""


class EpisodeScores(TypedDict):
    """The part of a record that scores and counters are computed from."""

    steps: np.ndarray
    """Environment steps taken, in any shape that sums to their number."""
    skipped: np.ndarray
    """(S, 2): time and slot of steps that a native vector environment spent on a reset."""
    returns: np.ndarray
    """(K,) float64: return of each episode that ended."""
    lengths: np.ndarray
    """(K,) int64."""
    infos: NotRequired[dict[str, np.ndarray]]
    """Key of `info` -> (K,) float64: its number at the end of each episode, NaN where `info` lacked the key."""


class LaneRecord(EpisodeScores):
    """What happened in a lane: T steps of W slots, and K ends of episodes in order of time, then slot.

    `steps` is (W,): how many of the T steps each slot took before it was left. `returns` and `lengths` cover whole
    episodes, also their part before this record.
    """

    observations: np.ndarray
    """(T+1, W, ...): the observations acted on; the last row is where the next step will act."""
    actions: np.ndarray
    """(T, W, components)."""
    rewards: np.ndarray
    """(T, W) float32."""
    ends: np.ndarray
    """(K, 2) int32: time and slot of the last step of each episode that ended."""
    terminated: np.ndarray
    """(K,) bool: True if the environment terminated the episode, False if it was truncated."""
    finals: np.ndarray
    """(K, ...): the observation after that step, which `observations` does not contain."""
    episodes: np.ndarray
    """(K,) int64: number of each of these episodes in its slot."""
    moments: NotRequired[MomentsRecord]
    """`Moments` of the observations acted on, if the policy normalises them."""


class LaneRecorder:
    """Collects the `LaneRecord` of one task while a lane plays."""

    def __init__(self, lane: Slots) -> None:
        self.lane = lane
        self.keys = (SUCCESS, *lane.spec.info_keys)
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
        self.infos: list[dict[str, float]] = []

    def step(self, observations: np.ndarray, actions: np.ndarray, rewards: list[float]) -> None:
        """Add one step of all slots."""
        self.observations.append(observations)
        self.actions.append(actions)
        self.rewards.append(rewards)

    def end(self, time: int, slot: int, terminated: bool, info: Mapping[str, Any]) -> None:
        """Add the end of an episode, before the next one begins in its slot."""
        lane = self.lane
        self.ends.append((time, slot))
        self.terminated.append(terminated)
        self.finals.append(lane.observations[slot].copy())
        self.returns.append(self._return(slot))
        self.lengths.append(lane.clock - lane.begun[slot])
        self.episodes.append(lane.episodes[slot])
        self.infos.append({key: self._number(slot, key, info[key]) for key in self.keys if key in info})

    def _number(self, slot: int, key: str, value: Any) -> float:
        lane = self.lane
        try:
            return float(value)
        except (TypeError, ValueError):
            if key not in lane.spec.info_keys:  # not asked for, so it must not end the run
                return np.nan
            where = lane.where(slot, lane.episodes[slot], lane.clock - lane.begun[slot] - 1)
            raise EnvironmentFault(
                f"info[{key!r}] is {str(value)[:80]!r} at the end of an episode, and a metric needs a number: {where}"
            ) from None

    def _return(self, slot: int) -> float:
        """Sum a slot's rewards since its episode began, in order of time wherever tasks were cut."""
        lane = self.lane
        total = lane.returns[slot]
        for row in self.rewards[max(lane.begun[slot] - self.clock, 0) :]:
            total += row[slot]  # not `sum`, which compensates in newer Pythons; `rebuild` adds one by one, too
        return total

    def record(self, policy: Policy, time: int) -> LaneRecord:
        """Assemble the record, and refuse numbers that are not finite."""
        lane = self.lane
        lane.returns = [self._return(slot) for slot in range(lane.width)]
        observations = np.stack([*self.observations, lane.observations])
        rewards = np.array(self.rewards, np.float32).reshape(time, lane.width)
        steps = np.full(lane.width, time, np.int32)
        for slot in range(lane.width):
            if lane.episodes[slot] < 0:
                last = [when for when, where in self.ends if where == slot]
                steps[slot] = last[-1] + 1 if last else 0
        self._check_finite("reward", rewards)
        self._check_finite("observation", observations)
        record: LaneRecord = {
            "observations": observations,
            "actions": np.stack(self.actions).astype(policy.distribution.action_dtype, copy=False),
            "rewards": rewards,
            "steps": steps,
            "ends": np.array(self.ends, np.int32).reshape(-1, 2),
            "terminated": np.array(self.terminated, bool),
            "finals": np.array(self.finals, observations.dtype).reshape(-1, *observations.shape[2:]),
            "returns": np.array(self.returns, np.float64),
            "lengths": np.array(self.lengths, np.int64),
            "episodes": np.array(self.episodes, np.int64),
            "skipped": np.array(self.skipped, np.int32).reshape(-1, 2),
        }
        known = dict.fromkeys(key for info in self.infos for key in info)
        if known:
            record["infos"] = {key: np.array([info.get(key, np.nan) for info in self.infos]) for key in known}
        self._check_finite("final observation", record["finals"])
        if policy.normalise:
            acted_on = policy.flatten(observations[:-1])
            real = np.arange(time)[:, None] < steps
            real[tuple(record["skipped"].T)] = False
            rows = [acted_on[real[:, slot], slot] for slot in range(lane.width)]
            record["moments"] = Moments.of(np.concatenate(rows)).to_record()
        return record

    def _check_finite(self, what: str, values: np.ndarray) -> None:
        if values.dtype.kind != "f" or np.isfinite(values.sum()) or np.isfinite(values).all():
            return
        at = np.argwhere(~np.isfinite(values))[0].tolist()
        # A final observation is listed by end; everything else by time and slot.
        time, slot = self.ends[at[0]] if what == "final observation" else (at[0], at[1])
        before = [end for end, where in self.ends if where == slot and end < time]
        first_episode, first_step = self.begun_at[slot]
        step = time - before[-1] - 1 if before else first_step + time
        where = self.lane.where(slot, first_episode + len(before), step)
        raise EnvironmentFault(value_not_finite(f"the {what}", values[tuple(at)], where))


def value_not_finite(what: str, value: float, where: str) -> str:
    """Word the message about a value that is not finite."""
    return (
        f"the environment returned {what} {value}\nin {where}. "
        f"Nothing was learned from it. Reset the environment with that seed to investigate, or clip what it returns"
    )
