"""A lane whose slots are one native vector environment: faster steps, but a longer replay when a worker is lost.

A native vector environment draws its own episodes, so the ledger of such a lane holds all actions since the environment
was created, not since each reset. To keep it short, the head re-creates lanes after `LIFE` steps; episodes that run at
that moment are cut off, which the learner treats as a truncation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.envs.vector import VectorEnv
from shoal.policies.actions import Distribution
from shoal.policies.policy import Actor
from shoal.sampling.lane import NOISE_STEPS
from shoal.sampling.lane_address import Ledger
from shoal.sampling.record import LaneRecorder
from shoal.sampling.slots import Slots

LIFE = 10_000
"""Steps of a slot before its lane is re-created. Part of the task: changing it changes every run."""


class VectorLane(Slots):
    """A lane that is stepped by one call. `over` marks the slots that will spend their next step on a reset."""

    def rebuild(self, ledger: Ledger, distribution: Distribution) -> None:
        """Create the environment and bring it to the state in the ledger, in which all slots have equal lengths."""
        born = ledger["0"]["episode"]
        self.env = VectorEnv(self.spec, [self.seed(slot, born) for slot in range(self.width)])
        self.allocate(self.env.observation_space)
        self.observations = self._kept(self.env.reset())
        self.episodes = [0] * self.width
        self.over = np.zeros(self.width, bool)
        for actions in np.stack([ledger[str(slot)]["actions"] for slot in range(self.width)], axis=1):
            rewards, *_ = self._advance(distribution, actions)
            self.returns = [total + reward for total, reward in zip(self.returns, rewards, strict=True)]

    def play(
        self,
        act: Actor,
        distribution: Distribution,
        rng: np.random.Generator,
        following: Callable[[int], int | None],
        recorder: LaneRecorder,
        steps: int,
    ) -> int:
        """Step all slots `steps` times. Slots start their next episodes themselves, so `following` is not used."""
        chunk = min(steps, NOISE_STEPS)
        for time in range(steps):
            if time % chunk == 0:
                noise = distribution.noise(rng, chunk, self.width)
            acted_on = self.observations
            actions = act(acted_on, noise[time % chunk], self.memory)
            rewards, reset, terminated, info = self._advance(distribution, actions)
            recorder.step(acted_on, actions, rewards)
            recorder.skipped += [(time, slot) for slot in reset]
            for slot in np.flatnonzero(self.over).tolist():
                recorder.end(
                    time, slot, bool(terminated[slot]), {key: info[key][slot] for key in recorder.keys if key in info}
                )
        return steps

    def _advance(
        self, distribution: Distribution, actions: np.ndarray
    ) -> tuple[list[float], list[int], np.ndarray, dict[str, Any]]:
        """Step all slots once: rewards, slots that spent the step on a reset, which episodes terminated, and info."""
        reset: list[int] = np.flatnonzero(self.over).tolist()
        try:
            observations, rewards, terminated, truncated, info = self.env.step(distribution.to_env(actions))
        except Exception as error:
            raise self.fault(0, error) from error
        self.clock += 1
        self.observations = self._kept(observations)
        self.over = terminated | truncated
        paid: list[float] = rewards.tolist()
        for slot in reset:
            self.episodes[slot] += 1
            self.begun[slot], self.returns[slot], paid[slot] = self.clock, 0.0, 0.0
        return paid, reset, terminated, info

    def _kept(self, observations: np.ndarray) -> np.ndarray:
        return np.array(observations, self.observations.dtype).reshape(self.observations.shape)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
