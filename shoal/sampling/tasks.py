"""Every function that Shoal's workers run for Shoal itself.

Workers that trust no other module still run these (see `engines/functions.py`), so nothing here may start processes,
write files or import modules by name other than an environment's.

- `fragment` continues a lane for a fixed number of steps. A worker that holds the live lane just goes on; any other
  worker receives the ledger and rebuilds the lane first. Episodes follow each other in a slot.
- `episodes` plays whole episodes from fresh resets.
- `evaluate` plays whole episodes of many policies in one lane.
- `describe` reports the spaces of an environment, and `canary` a digest of this machine's arithmetic.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypedDict

import numpy as np

from shoal.base import seeding
from shoal.engines import fingerprint
from shoal.envs.make import EnvRecord, EnvSpec, FlatObservation, make_env, observation_dtype
from shoal.envs.vector import VectorEnv
from shoal.policies import actions
from shoal.policies.policy import Policy, PolicyRecord, Spaces, Weights
from shoal.sampling.lane import IdleEnvs, Lane
from shoal.sampling.lane_address import LaneAddress, Ledger
from shoal.sampling.population_lane import EvaluationRecord, MembersRecord, PlanRecord, PopulationLane, Tally
from shoal.sampling.record import LaneRecord, LaneRecorder
from shoal.sampling.vector_lane import VectorLane

KEEP_RUNS = 16
"""Runs whose lanes a worker keeps: it may serve several heads at once."""


class Budget(TypedDict, total=False):
    """How long `episodes` plays: a number of episodes, or until this many steps were taken and all episodes ended."""

    episodes: int
    steps: int


class HeldLanes:
    """The live lanes of a worker, so that the next fragment of a lane continues without a replay."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, dict[int, tuple[int, Lane | VectorLane]]] = OrderedDict()

    def take(self, address: LaneAddress) -> Lane | VectorLane | None:
        """Take out the lane at an address, if this worker holds it at exactly that fragment."""
        token = address["token"]
        held = self._runs.setdefault(token, {})
        self._runs.move_to_end(token)
        position, lane = held.pop(address["lane"], (-1, None))
        if lane is not None and position != address["fragment"]:
            lane.close()
            return None
        return lane

    def keep(self, address: LaneAddress, lane: Lane | VectorLane) -> None:
        """Keep a lane for its next fragment, and close the lanes of the runs that were served longest ago."""
        self._runs[address["token"]][address["lane"]] = (address["fragment"] + 1, lane)
        while len(self._runs) > KEEP_RUNS:
            _, lanes = self._runs.popitem(last=False)
            for _, old in lanes.values():
                old.close()

    def clear(self) -> None:
        """Forget all lanes."""
        self._runs.clear()

    def __len__(self) -> int:
        return len(self._runs)


# A worker is one process that runs one task at a time, so what it keeps between tasks belongs to the module.
held = HeldLanes()
idle = IdleEnvs()


def fragment(
    address: LaneAddress, policy: PolicyRecord, weights: Weights, steps: int, ledger: Ledger | None = None
) -> LaneRecord | None:
    """Play the next `steps` steps of a lane.

    Returns None if this worker does not hold the lane at that fragment and no ledger was sent: the head then asks
    again, with the ledger.
    """
    parsed = Policy.from_record(policy)
    if parsed.remembered:
        raise AssertionError("a ledger has no recurrent state, so recurrent policies play whole episodes only")
    lane = held.take(address)
    if ledger is not None:
        if lane is not None:
            lane.close()
        lane = VectorLane(address) if address["env"]["vector"] else Lane(address, idle)
        lane.rebuild(ledger, parsed.distribution)
    if lane is None:
        return None
    current = lane.episodes
    rng = seeding.rng(address["seed"], address["purpose"] + "-act", address["lane"], address["fragment"])
    recorder = LaneRecorder(lane)
    act = parsed.actor(weights, address["lane"])
    time = lane.play(act, parsed.distribution, rng, lambda slot: current[slot] + 1, recorder, steps)
    record = recorder.record(parsed, time)
    held.keep(address, lane)
    return record


def episodes(
    address: LaneAddress, policy: PolicyRecord, weights: Weights, budget: Budget, greedy: bool = False
) -> LaneRecord:
    """Play whole episodes.

    Which episodes are played never depends on how fast this lane is compared with others: with a budget of steps,
    episodes start until that many steps were taken, and then all of them finish.
    """
    parsed = Policy.from_record(policy)
    lane = Lane(address, idle, parsed.remembered)
    count = budget.get("episodes")
    started = lane.width if count is None else min(lane.width, count)
    for slot in range(started):
        lane.begin(slot, 0)

    def following(slot: int) -> int | None:
        nonlocal started
        if lane.taken >= budget["steps"] if count is None else started >= count:
            return None
        started += 1
        return lane.episodes[slot] + 1

    rng = None if greedy else seeding.rng(address["seed"], address["purpose"] + "-act", address["lane"], 0)
    recorder = LaneRecorder(lane)
    time = lane.play(parsed.actor(weights, address["lane"]), parsed.distribution, rng, following, recorder)
    record = recorder.record(parsed, time)
    lane.close()
    return record


def evaluate(
    address: LaneAddress,
    policy: PolicyRecord,
    weights: Weights,
    plan: PlanRecord,
    members: MembersRecord,
    table: tuple[int, int],
) -> EvaluationRecord:
    """Play whole episodes of the members of a population; return scores in order of members, then of episodes."""
    parsed = Policy.from_record(policy)
    lane = PopulationLane(address, idle, parsed, weights, plan, members, table)
    tally = Tally(lane, parsed)
    lane.fill()
    with np.errstate(over="ignore", invalid="ignore"):  # the tally looks for the results of overflows
        while lane.width:
            act = parsed.actor({"params": lane.params, "mean": weights["mean"], "scale": weights["scale"]})
            lane.play(act, parsed.distribution, None, tally.following, tally, narrowing=True)
            tally.narrow(lane.narrow())  # each row is computed separately, so it is the same without the others
    return tally.record()


def describe(env: EnvRecord) -> Spaces:
    """Make an environment and report its spaces."""
    spec = EnvSpec.from_record(env)
    made = VectorEnv(spec, [0]) if spec.vector else make_env(spec)
    try:
        space = made.observation_space
        spaces: Spaces = {
            "shape": list(space.shape or ()),
            "dtype": observation_dtype(space).str,
            "distribution": actions.to_record(actions.distribution_for(made.action_space)),
        }
        if isinstance(made, FlatObservation):
            spaces["flattened"] = made.flattener.to_record()
        return spaces
    finally:
        made.close()


def canary(_: int) -> str:
    """Compute the arithmetic digest of the machine that this worker runs on."""
    return fingerprint.canary()
