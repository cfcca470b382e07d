"""Populations: many policies, each evaluated by whole episodes, which evolution strategies and other searches need.

This is the head's side, which divides members into lanes; workers play them in a `population_lane`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from shoal.base.moments import Moments
from shoal.engines.base import Engine
from shoal.engines.wire import Shared
from shoal.envs.make import EnvSpec
from shoal.policies.policy import Policy
from shoal.sampling import tasks
from shoal.sampling.lane_address import LaneAddress
from shoal.sampling.population_lane import EvaluationRecord, MembersRecord, PlanRecord
from shoal.sampling.record import EpisodeScores


@dataclass(frozen=True)
class Plan:
    """How members are evaluated."""

    generation: int
    """Part of the seeds of their episodes, unless these are fixed."""
    episodes: int
    """Minimum number of episodes of each member."""
    steps: int
    """Minimum number of environment steps of each member."""
    limit: int | None
    """Truncate episodes after this many steps."""
    fixed_seeds: bool = False
    """Whether the environments are the same in every generation."""


@dataclass(frozen=True)
class Members:
    """The n members to evaluate: given by `params`, or by `offsets` into the noise table and `scales` of that noise."""

    seeds: np.ndarray
    """(n,) int64: members with equal numbers play in equal environments. A negative number plays one whole episode
    whatever the plan says, to be reported and not learned from."""
    params: np.ndarray | None = None
    """(n, count) float32: the parameters of each."""
    offsets: np.ndarray | None = None
    """(n,) int64: where the noise of each starts in the table."""
    scales: np.ndarray | None = None
    """(n,) float32: factor of the noise that is added to the shared parameters."""

    def part(self, here: slice) -> MembersRecord:
        """Cut out the members of one lane."""
        parts = {name: values[here] for name, values in vars(self).items() if values is not None}
        return cast(MembersRecord, parts)


@dataclass(frozen=True)
class Outcome:
    """The episodes of all members, in order of members, then of episodes."""

    members: np.ndarray
    """(episodes,) int64: which member played it."""
    returns: np.ndarray
    """(episodes,) float64."""
    lengths: np.ndarray
    """(episodes,) int64."""
    moments: Moments
    """Moments of all observations acted on, if the policy normalises them."""

    def fitness(self, count: int) -> np.ndarray:
        """Compute the mean return of each member (count,) float64."""
        totals = np.bincount(self.members, self.returns, count)
        return totals / np.bincount(self.members, minlength=count)

    def scores(self, members: slice) -> EpisodeScores:
        """Select the episodes of some members."""
        chosen = (self.members >= members.start) & (self.members < members.stop)
        lengths = self.lengths[chosen]
        skipped = np.zeros((0, 2), np.int32)
        return {"returns": self.returns[chosen], "lengths": lengths, "steps": lengths, "skipped": skipped}


class Population:
    """Evaluates members on an engine: in at most `lanes` tasks, each of at most `width` episodes at a time."""

    def __init__(
        self, engine: Engine, env: EnvSpec, policy: Policy, seed: int, lanes: int, width: int,
        table: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        self.engine, self.policy = engine, policy
        self.lanes, self.width = lanes, width
        self._seed, self._env = seed, env.to_record()
        self._policy = policy.to_record()
        self._table = table

    def evaluate(self, weights: Shared, plan: Plan, members: Members) -> Outcome:
        """Evaluate all members. `weights` are `Weights`, or only `Statistics` if the members bring their parameters."""
        how = cast(PlanRecord, dict(vars(plan)))
        futures, starts = [], [0]
        for lane, size in enumerate(shares(len(members.seeds), self.lanes)):
            here = slice(starts[-1], starts[-1] + size)
            starts.append(here.stop)
            planned = int(np.where(members.seeds[here] < 0, 1, plan.episodes).sum())
            address: LaneAddress = {
                "seed": self._seed,
                "purpose": "fitness",
                "lane": lane,
                "width": min(self.width, planned),
                "env": self._env,
            }
            task = (address, self._policy, weights, how, members.part(here), self._table)
            futures.append(self.engine.submit(tasks.evaluate, *task))
        try:
            records: list[EvaluationRecord] = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
        moments = Moments.empty(self.policy.inputs)
        for record in records:
            moments = moments.merge(Moments.from_record(record["moments"]))
        return Outcome(
            np.concatenate([start + record["members"] for start, record in zip(starts, records, strict=False)]),
            np.concatenate([record["returns"] for record in records]),
            np.concatenate([record["lengths"] for record in records]),
            moments,
        )


def shares(count: int, lanes: int) -> list[int]:
    """Divide `count` members among lanes: with many lanes, the first get three times as many as the last.

    So a worker that is done early finds a short task left, and no worker waits long for the last one, for any number of
    workers.
    """
    skew = 0.5 if lanes >= 4 else 0.0
    ends = [round(count * done * (1 + skew * (1 - done))) for done in np.linspace(0, 1, lanes + 1).tolist()]
    return [size for size in np.diff(ends).tolist() if size]
