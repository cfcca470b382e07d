"""A lane whose slots are one native vector environment: faster steps, and a longer way back when a worker is lost.

The ledger of such a lane holds its actions since the vector environment was made, not since each reset, because the
environment draws its own episodes. So that it stays short, the head has lanes made anew after `LIFE` steps; episodes
that run at that moment are cut off there, which the learner treats as a truncation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shoal.base.trees import Tree
from shoal.envs.vector import VectorEnv
from shoal.policies.policy import Policy
from shoal.sampling.record import NOISE_STEPS, Record, Slots

LIFE = 10_000
"""Steps of a slot before its lane is made anew. Part of the task: changing it changes every run."""


class VectorLane(Slots):
    """A lane that one call steps. `over` says which slots will spend their next step on a reset."""

    def rebuild(self, ledger: Tree, policy: Policy) -> None:
        """Make the environment and bring it to where the ledger says it is. All slots have equally long ledgers."""
        born = ledger["0"]["episode"]
        self.env = VectorEnv(self.spec, [self.seed(slot, born) for slot in range(self.width)])
        self.see(self.env.observation_space)
        self.observations = self._kept(self.env.reset())
        self.episodes = [0] * self.width
        self.over = np.zeros(self.width, bool)
        for actions in np.stack([ledger[str(slot)]["actions"] for slot in range(self.width)], axis=1):
            rewards, _, _ = self._advance(policy, actions)
            self.returns = [total + reward for total, reward in zip(self.returns, rewards, strict=True)]

    def run(
        self,
        policy: Policy,
        weights: Tree,
        rng: np.random.Generator | None,
        following: Callable[[int], int | None],
        steps: int | None = None,
    ) -> Tree:
        """Step all slots `steps` times."""
        if rng is None or steps is None:
            raise AssertionError("vector lanes run fragments only")
        act, head = policy.actor(weights, self.place["lane"]), policy.head
        record = Record(self)
        chunk = min(steps, NOISE_STEPS)
        for time in range(steps):
            if time % chunk == 0:
                noise = head.noise(rng, chunk, self.width)
            acted_on = self.observations
            actions = act(acted_on, noise[time % chunk], self.memory)
            rewards, reset, terminated = self._advance(policy, actions)
            record.step(acted_on, actions, rewards)
            record.skipped += [(time, slot) for slot in reset]
            for slot in np.flatnonzero(self.over).tolist():
                record.end(time, slot, bool(terminated[slot]))
        return record.tree(policy, steps)

    def _advance(self, policy: Policy, actions: np.ndarray) -> tuple[list[float], list[int], np.ndarray]:
        """One step of all slots: rewards, the slots that spent it on a reset, and which episodes terminated."""
        reset: list[int] = np.flatnonzero(self.over).tolist()
        try:
            observations, rewards, terminated, truncated = self.env.step(policy.head.to_env(actions))
        except Exception as error:
            raise self.raised(0, error) from error
        self.clock += 1
        self.observations = self._kept(observations)
        self.over = terminated | truncated
        paid: list[float] = rewards.tolist()
        for slot in reset:
            self.episodes[slot] += 1
            self.begun[slot], self.returns[slot], paid[slot] = self.clock, 0.0, 0.0
        return paid, reset, terminated

    def _kept(self, observations: np.ndarray) -> np.ndarray:
        return np.array(observations, self.observations.dtype).reshape(self.observations.shape)

    def close(self) -> None:
        """Free the environment."""
        self.env.close()
