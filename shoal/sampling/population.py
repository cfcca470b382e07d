"""Many policies, each evaluated by whole episodes: what evolution strategies and other searches ask for.

A lane plays episodes of its members in lockstep, each slot with weights of its own. Where an episode has ended, the
next one takes its slot, of the same member or of another, so that no slot waits for a long episode elsewhere. Which
members a lane has, in which order they take slots and what their environments are reset with follow from the task
alone. Only scores come back, and where observations are normalised their moments.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.base import seeding
from shoal.base.moments import Moments
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.engines.wire import Shared
from shoal.envs.make import EnvSpec
from shoal.errors import EnvironmentFault, LearningFault
from shoal.policies.policy import Policy
from shoal.sampling import noise_table
from shoal.sampling.lane import Lane
from shoal.sampling.record import NOISE_STEPS

# As the head sees it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How members are evaluated."""

    generation: int
    """Part of the seeds of their episodes, unless these are fixed."""
    episodes: int
    """Each plays at least so many..."""
    steps: int
    """...and until it has taken so many steps."""
    limit: int | None
    """Episodes are cut off after so many steps."""
    fixed_seeds: bool = False
    """Whether the environments are the same in every generation."""


@dataclass(frozen=True)
class Members:
    """Who is evaluated. Either `params`, or `places` in a noise table and `scales` for steps away from the centre."""

    seeds: np.ndarray
    """(n,) int64: those with an equal number play in equal environments. Negative: plays one whole episode whatever the
    plan, to be looked at and not learned from."""
    params: np.ndarray | None = None
    """(n, count) float32: the weights of each."""
    places: np.ndarray | None = None
    """(n,) int64."""
    scales: np.ndarray | None = None
    """(n,) float32."""


@dataclass(frozen=True)
class Outcome:
    """Episodes of all members, in order of members, then of time."""

    members: np.ndarray
    """(episodes,) whose."""
    returns: np.ndarray
    lengths: np.ndarray
    moments: Moments
    """Of all observations that were acted on, if the policy normalises them."""

    def fitness(self, count: int) -> np.ndarray:
        """Mean return of each member (count,) float64."""
        totals = np.bincount(self.members, self.returns, count)
        return totals / np.bincount(self.members, minlength=count)

    def record(self, members: slice) -> Tree:
        """Episodes of some members as `rollout.Scores` counts them."""
        chosen = (self.members >= members.start) & (self.members < members.stop)
        lengths = self.lengths[chosen]
        return {"returns": self.returns[chosen], "lengths": lengths, "steps": lengths, "skipped": ()}


class Population:
    """Evaluates members on an engine: in at most `lanes` tasks, each of at most `width` episodes at a time."""

    def __init__(
        self, engine: Engine, env: EnvSpec, policy: Policy, seed: int, lanes: int, width: int,
        table: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        self.engine, self.policy = engine, policy
        self.lanes, self.width = lanes, width
        self._place = {"seed": seed, "env": env.to_tree(), "purpose": "fitness"}
        self._policy = policy.to_tree()
        self._table = list(table)

    def evaluate(self, weights: Shared, plan: Plan, members: Members) -> Outcome:
        """Evaluate all members."""
        futures, starts = [], [0]
        for lane, size in enumerate(shares(len(members.seeds), self.lanes)):
            here = slice(starts[-1], starts[-1] + size)
            starts.append(here.stop)
            planned = np.where(members.seeds[here] < 0, 1, plan.episodes).sum()
            place = self._place | {"lane": lane, "width": min(self.width, int(planned))}
            told = {name: values[here] for name, values in vars(members).items() if values is not None}
            futures.append(self.engine.submit(evaluate, place, self._policy, weights, vars(plan), told, self._table))
        try:
            records = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
        moments = Moments.empty(self.policy.inputs)
        for record in records:
            moments = moments.merge(Moments.from_tree(record["moments"]))
        return Outcome(
            np.concatenate([start + record["members"] for start, record in zip(starts, records, strict=False)]),
            np.concatenate([record["returns"] for record in records]),
            np.concatenate([record["lengths"] for record in records]),
            moments,
        )


def shares(count: int, lanes: int) -> list[int]:
    """How many of `count` members each lane gets: where there are many lanes, the first get thrice what the last do.

    So whoever is done early finds a short task left, and nobody waits long for the last one, with any number of
    workers.
    """
    skew = 0.5 if lanes >= 4 else 0.0
    ends = [round(count * done * (1 + skew * (1 - done))) for done in np.linspace(0, 1, lanes + 1).tolist()]
    return [size for size in np.diff(ends).tolist() if size]


# As a worker sees it ---------------------------------------------------------------------------------------------


def evaluate(place: Tree, policy: Tree, weights: Tree, plan: Tree, members: Tree, table: list[int]) -> Tree:
    """Task: episodes of members, in order of members, then of time."""
    parsed = Policy.from_tree(policy)
    stacked = np.zeros((place["width"], parsed.count), np.float32)
    seeds = members["seeds"].tolist()
    lane = _Turns(place, plan, seeds, parsed.remembered)
    tally = _Tally(lane, parsed)
    planned = [1 if seed < 0 else plan["episodes"] for seed in seeds]
    waiting = deque((member, number) for member, count in enumerate(planned) for number in range(count))
    loaded = [-1] * lane.width  # who is in each slot

    def load(slot: int, member: int) -> None:
        if loaded[slot] == member:
            return
        loaded[slot] = member
        if "params" in members:
            stacked[slot] = members["params"][member]
        else:
            start = int(members["places"][member])
            row = noise_table.table(*table)[start : start + parsed.count]
            np.multiply(row, members["scales"][member], out=stacked[slot])
            stacked[slot] += weights["params"]
        if not _finite(stacked[slot]):
            raise LearningFault(
                f"a policy of generation {plan['generation']} has weights that are not finite, so it was not tried. "
                f"Likely cause: steps that are far too large; try a smaller --sigma"
            )

    def enter(slot: int) -> int:
        member, number = waiting.popleft()
        load(slot, member)
        return lane.turn(member, number)

    def following(slot: int) -> int | None:
        member = loaded[slot]
        if seeds[member] >= 0 and planned[member] <= tally.episodes[member] and tally.steps[member] < plan["steps"]:
            return lane.turn(member, tally.episodes[member])
        return enter(slot) if waiting else None

    for slot in range(lane.width):
        lane.begin(slot, enter(slot))
    with np.errstate(over="ignore", invalid="ignore"):  # the tally looks for what comes of it
        while lane.width:
            act = parsed.actor(weights | {"params": stacked[: lane.width]})
            lane.play(act, parsed.head, None, following, tally, narrowing=True)
            kept = lane.narrow()  # each row is computed by itself, so it is the same without the others
            stacked[: lane.width] = stacked[kept]
            loaded[:] = [loaded[slot] for slot in kept]
            tally.totals = [tally.totals[slot] for slot in kept]
    return tally.tree()


def _finite(numbers: np.ndarray) -> bool:
    return bool(np.isfinite(numbers.sum())) or bool(np.isfinite(numbers).all())  # the sum of large ones may not be


class _Turns(Lane):
    """A lane whose episodes are turns of members; they are numbered as they begin."""

    def __init__(self, place: Tree, plan: Tree, seeds: list[int], remembered: int) -> None:
        super().__init__(place)
        self.generation, self.cut = plan["generation"], plan["limit"]
        self._season = 0 if plan["fixed_seeds"] else self.generation
        self.seeds = seeds
        self.memory = np.zeros((self.width, remembered), np.float32)
        self.turns: list[tuple[int, int, int]] = []  # member, which of its episodes, and when by the clock
        self._ages = [-1] * self.width

    def narrow(self) -> list[int]:
        """Go on without the slots that were left."""
        kept = super().narrow()
        self._ages = [self._ages[slot] for slot in kept]
        return kept

    def turn(self, member: int, number: int) -> int:
        """A new turn: an episode of a member."""
        self.turns.append((member, number, self.clock))
        return len(self.turns) - 1

    def seed(self, slot: int, episode: int) -> int:
        """What the environment is reset with: does not depend on lane or slot."""
        member, number, _ = self.turns[episode]
        return seeding.integer(self.place["seed"], "fitness", self._season, self.seeds[member], number)

    def _age(self, slot: int, episode: int) -> int:
        self._ages[slot] += 1
        return self._ages[slot]

    def _due(self, slot: int) -> int:
        limits = [self.limit] if self.limit else []
        if self.cut and self.seeds[self.turns[self.episodes[slot]][0]] >= 0:
            limits.append(self.cut)
        return self.begun[slot] + min(limits) if limits else -1


class _Tally:
    """What is kept of a population's steps: sums. Looks at observations only to see that they and what is done about
    them are finite, and for their moments."""

    def __init__(self, lane: _Turns, policy: Policy) -> None:
        self.lane, self.policy = lane, policy
        self.totals = [0.0] * lane.width
        self.steps, self.episodes = [0] * len(lane.seeds), [0] * len(lane.seeds)
        """Of each member, in episodes that have ended; and how many have."""
        self.ended: list[tuple[int, int, float, int]] = []  # member, which of its episodes, return, length
        self.moments = Moments.empty(policy.inputs)
        self._observations: list[np.ndarray] = []
        self._actions: list[np.ndarray] = []
        self._turns: list[list[int]] = []

    def step(self, observations: np.ndarray, actions: np.ndarray, rewards: list[float]) -> None:
        """Add rewards up."""
        self.totals = list(map(operator.add, self.totals, rewards))
        self._observations.append(observations)
        self._actions.append(actions)
        self._turns.append(self.lane.episodes.copy())
        if len(self._observations) == NOISE_STEPS:
            self._look()

    def end(self, time: int, slot: int, terminated: bool) -> None:
        """An episode ended."""
        lane = self.lane
        member, number, begun = lane.turns[lane.episodes[slot]]
        length, total = lane.clock - begun, self.totals[slot]
        if not np.isfinite(total):
            self._refuse("rewards that add up to", total, slot, lane.episodes[slot], length)
        if self.policy.remembered and not _finite(lane.memory[slot]):
            raise self._overflow()
        self.ended.append((member, number, total, length))
        self.steps[member] += length
        self.episodes[member] += 1
        self.totals[slot] = 0.0

    def tree(self) -> Tree:
        """Plain data."""
        self._look()
        members, _, returns, lengths = zip(*sorted(self.ended), strict=True)
        return {
            "members": np.array(members, np.int64),
            "returns": np.array(returns, np.float64),
            "lengths": np.array(lengths, np.int64),
            "moments": self.moments.to_tree(),
        }

    def _look(self) -> None:
        """Check the observations and actions of the last steps, and add observations to the moments.

        Slots that were left stay where they are, and what is computed there does not count.
        """
        if not self._observations:
            return
        seen, done, turns = np.concatenate(self._observations), np.concatenate(self._actions), self._turns
        self._observations, self._actions, self._turns = [], [], []
        if not _finite(seen) or not _finite(done) or not _finite(self.lane.memory):
            self._blame(seen, done, turns)
        if self.policy.normalise:
            playing = np.fromiter(itertools.chain.from_iterable(turns), np.int64, len(seen)) >= 0
            self.moments = self.moments.merge(Moments.of(self.policy.numbers(seen)[playing]))

    def _blame(self, seen: np.ndarray, done: np.ndarray, turns: list[list[int]]) -> None:
        """Numbers that are not finite came from the environment, or, if they were in actions first, from the policy."""
        lane = self.lane
        rows = [(time, slot, turn) for time, row in enumerate(turns) for slot, turn in enumerate(row)]
        wrong, wrong_done = (
            [at for at in np.argwhere(~np.isfinite(numbers)).tolist() if rows[at[0]][2] >= 0]
            for numbers in (seen, done)
        )
        if wrong and not (wrong_done and rows[wrong_done[0][0]][0] < rows[wrong[0][0]][0]):
            time, slot, turn = rows[wrong[0][0]]
            step = lane.clock - len(turns) + time - lane.turns[turn][2]
            self._refuse("the observation", seen[tuple(wrong[0])], slot, turn, step)
        if wrong_done or not _finite(lane.memory[np.array(lane.episodes) >= 0]):
            raise self._overflow()

    def _overflow(self) -> LearningFault:
        return LearningFault(
            f"a policy of generation {self.lane.generation} computed numbers that are not finite from observations "
            f"that are. Likely causes: weights that are far too large (a smaller --sigma helps), or a memory that "
            f"grows without end (--activation tanh keeps it in bounds; here it is {self.policy.activation})"
        )

    def _refuse(self, what: str, value: Any, slot: int, turn: int, step: int) -> None:
        raise EnvironmentFault(
            f"the environment returned {what} {value}\nin {self.lane.where(slot, turn, step)}. "
            f"Nothing was learned from it. Look at the environment with that seed, or clip what it returns"
        )
