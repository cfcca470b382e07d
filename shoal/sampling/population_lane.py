"""A lane that evaluates the members of a population, each slot acting with the weights of its member.

Where an episode has ended, the next one takes its slot, of the same member or of another, so that no slot waits for a
long episode elsewhere. Which members a lane has, in which order they take slots and with which seeds their environments
are reset follow from the task alone. Only scores come back and, where observations are normalised, their moments.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from typing import NotRequired, TypedDict

import numpy as np

from shoal.base import seeding
from shoal.base.moments import Moments, MomentsRecord
from shoal.errors import EnvironmentFault, LearningFault
from shoal.policies.policy import Policy, Weights
from shoal.sampling import noise_table
from shoal.sampling.lane import NOISE_STEPS, IdleEnvs, Lane
from shoal.sampling.lane_address import LaneAddress
from shoal.sampling.record import value_not_finite


class PlanRecord(TypedDict):
    """How members are evaluated; see `population.Plan`."""

    generation: int
    episodes: int
    steps: int
    limit: int | None
    fixed_seeds: bool


class MembersRecord(TypedDict):
    """The n members of one lane; see `population.Members`."""

    seeds: np.ndarray
    """(n,) int64."""
    params: NotRequired[np.ndarray]
    """(n, count) float32."""
    offsets: NotRequired[np.ndarray]
    """(n,) int64."""
    scales: NotRequired[np.ndarray]
    """(n,) float32."""


class EvaluationRecord(TypedDict):
    """The episodes of a lane's members, in order of members, then of episodes."""

    members: np.ndarray
    """(episodes,) int64: which member of the lane played it."""
    returns: np.ndarray
    """(episodes,) float64."""
    lengths: np.ndarray
    """(episodes,) int64."""
    moments: MomentsRecord
    """`Moments` of the observations acted on; empty unless the policy normalises them."""


class PopulationLane(Lane):
    """A lane whose episodes are turns of members, numbered as they begin."""

    def __init__(
        self,
        address: LaneAddress,
        idle: IdleEnvs,
        policy: Policy,
        weights: Weights,
        plan: PlanRecord,
        members: MembersRecord,
        table: tuple[int, int],
    ) -> None:
        super().__init__(address, idle, policy.remembered)
        self.plan, self.members = plan, members
        self.seeds: list[int] = members["seeds"].tolist()
        self.planned = [1 if seed < 0 else plan["episodes"] for seed in self.seeds]
        self.turns: list[tuple[int, int, int]] = []  # member, number of its episode, and when by the clock
        self.loaded = [-1] * self.width  # member in each slot
        self._centre, self._table = weights, table
        self._params = np.zeros((self.width, policy.count), np.float32)
        self._ages = [-1] * self.width
        self._waiting = deque((member, number) for member, count in enumerate(self.planned) for number in range(count))

    @property
    def params(self) -> np.ndarray:
        """Parameters of the members in the slots (width, count): a view, which changes as members take turns."""
        return self._params[: self.width]

    def fill(self) -> None:
        """Start the first episode of every slot."""
        for slot in range(self.width):
            self.begin(slot, self._enter(slot))

    def next_turn(self, slot: int, played: int | None) -> int | None:
        """Start another turn in a slot: the next episode of its member if `played` of them are not enough, or None."""
        if played is not None:
            return self._turn(self.loaded[slot], played)
        return self._enter(slot) if self._waiting else None

    def _enter(self, slot: int) -> int:
        member, number = self._waiting.popleft()
        self._load(slot, member)
        return self._turn(member, number)

    def _turn(self, member: int, number: int) -> int:
        self.turns.append((member, number, self.clock))
        return len(self.turns) - 1

    def _load(self, slot: int, member: int) -> None:
        if self.loaded[slot] == member:
            return
        self.loaded[slot] = member
        params = self._params[slot]
        if "params" in self.members:
            params[:] = self.members["params"][member]
        else:
            start = int(self.members["offsets"][member])
            row = noise_table.open_table(*self._table)[start : start + len(params)]
            np.multiply(row, self.members["scales"][member], out=params)
            params += self._centre["params"]
        if not finite(params):
            raise LearningFault(
                f"a policy of generation {self.plan['generation']} has weights that are not finite, so it was not "
                f"evaluated. Likely cause: steps that are far too large; try a smaller --sigma"
            )

    def narrow(self) -> list[int]:
        """Drop the slots that were left, with their parameters."""
        kept = super().narrow()
        self._ages = [self._ages[slot] for slot in kept]
        self.loaded = [self.loaded[slot] for slot in kept]
        self._params[: self.width] = self._params[kept]
        return kept

    def seed(self, slot: int, episode: int) -> int:
        """Derive the seed of a turn, which depends neither on the lane nor on the slot."""
        member, number, _ = self.turns[episode]
        season = 0 if self.plan["fixed_seeds"] else self.plan["generation"]
        return seeding.integer(self.address["seed"], "fitness", season, self.seeds[member], number)

    def _age(self, slot: int, episode: int) -> int:
        self._ages[slot] += 1
        return self._ages[slot]

    def _due(self, slot: int) -> int:
        limits = [self.limit] if self.limit else []
        if self.plan["limit"] and self.seeds[self.turns[self.episodes[slot]][0]] >= 0:
            limits.append(self.plan["limit"])
        return self.begun[slot] + min(limits) if limits else -1


class Tally:
    """Sums the rewards of a population lane, and looks at observations and actions only for moments and overflows."""

    def __init__(self, lane: PopulationLane, policy: Policy) -> None:
        self.lane, self.policy = lane, policy
        self.totals = [0.0] * lane.width  # return of the running episode in each slot
        self.steps, self.episodes = [0] * len(lane.seeds), [0] * len(lane.seeds)  # of each member, in ended episodes
        self.ended: list[tuple[int, int, float, int]] = []  # member, number of its episode, return, length
        self.moments = Moments.empty(policy.inputs)
        self._observations: list[np.ndarray] = []
        self._actions: list[np.ndarray] = []
        self._turns: list[list[int]] = []

    def step(self, observations: np.ndarray, actions: np.ndarray, rewards: list[float]) -> None:
        """Add the rewards of one step."""
        self.totals = list(map(operator.add, self.totals, rewards))
        self._observations.append(observations)
        self._actions.append(actions)
        self._turns.append(self.lane.episodes.copy())
        if len(self._observations) == NOISE_STEPS:
            self._look()

    def end(self, time: int, slot: int, terminated: bool, info: object) -> None:
        """Add an episode to the scores of its member."""
        lane = self.lane
        member, number, begun = lane.turns[lane.episodes[slot]]
        length, total = lane.clock - begun, self.totals[slot]
        if not np.isfinite(total):
            where = lane.where(slot, lane.episodes[slot], length)
            raise EnvironmentFault(value_not_finite("rewards that add up to", total, where))
        if self.policy.remembered and not finite(lane.memory[slot]):
            raise self._overflow()
        self.ended.append((member, number, total, length))
        self.steps[member] += length
        self.episodes[member] += 1
        self.totals[slot] = 0.0

    def following(self, slot: int) -> int | None:
        """Choose the next turn in a slot: members play on until they have taken the planned number of steps."""
        lane = self.lane
        member = lane.loaded[slot]
        played, planned = self.episodes[member], lane.planned[member]
        more = lane.seeds[member] >= 0 and planned <= played and self.steps[member] < lane.plan["steps"]
        return lane.next_turn(slot, played if more else None)

    def narrow(self, kept: list[int]) -> None:
        """Drop the slots that the lane has dropped."""
        self.totals = [self.totals[slot] for slot in kept]

    def record(self) -> EvaluationRecord:
        """Assemble the record of the lane."""
        self._look()
        members, _, returns, lengths = zip(*sorted(self.ended), strict=True)
        return {
            "members": np.array(members, np.int64),
            "returns": np.array(returns, np.float64),
            "lengths": np.array(lengths, np.int64),
            "moments": self.moments.to_record(),
        }

    def _look(self) -> None:
        """Check the observations and actions of the last steps, and add the observations to the moments.

        Slots that were left keep their last observation; what is computed there does not count.
        """
        if not self._observations:
            return
        seen, done, turns = np.concatenate(self._observations), np.concatenate(self._actions), self._turns
        self._observations, self._actions, self._turns = [], [], []
        if not finite(seen) or not finite(done) or not finite(self.lane.memory):
            self._blame(seen, done, turns)
        if self.policy.normalise:
            playing = np.fromiter(itertools.chain.from_iterable(turns), np.int64, len(seen)) >= 0
            self.moments = self.moments.merge(Moments.of(self.policy.flatten(seen)[playing]))

    def _blame(self, seen: np.ndarray, done: np.ndarray, turns: list[list[int]]) -> None:
        """Blame the environment for numbers that are not finite, or the policy if its actions had them first."""
        lane = self.lane
        rows = [(time, slot, turn) for time, row in enumerate(turns) for slot, turn in enumerate(row)]
        wrong, wrong_done = (
            [at for at in np.argwhere(~np.isfinite(numbers)).tolist() if rows[at[0]][2] >= 0]
            for numbers in (seen, done)
        )
        if wrong and not (wrong_done and rows[wrong_done[0][0]][0] < rows[wrong[0][0]][0]):
            time, slot, turn = rows[wrong[0][0]]
            step = lane.clock - len(turns) + time - lane.turns[turn][2]
            where = lane.where(slot, turn, step)
            raise EnvironmentFault(value_not_finite("the observation", seen[tuple(wrong[0])], where))
        if wrong_done or not finite(lane.memory[np.array(lane.episodes) >= 0]):
            raise self._overflow()

    def _overflow(self) -> LearningFault:
        return LearningFault(
            f"a policy of generation {self.lane.plan['generation']} computed numbers that are not finite from finite "
            f"observations. Likely causes: weights that are far too large (try a smaller --sigma), or a recurrent "
            f"state that grows without bound (--activation tanh bounds it; here it is {self.policy.activation})"
        )


def finite(numbers: np.ndarray) -> bool:
    """Test whether all numbers are finite. The sum is checked first, being faster; a sum of large ones may overflow."""
    return bool(np.isfinite(numbers.sum())) or bool(np.isfinite(numbers).all())
