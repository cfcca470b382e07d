"""The lanes of a run on the head: which tasks make a batch, and the ledger from which any worker can rebuild a lane.

The number of lanes and their width come from the settings, never from the number of workers, and records are used in
lane order; so a batch is the same whichever workers computed it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np

from shoal.engines.base import Engine
from shoal.engines.wire import Shared
from shoal.envs.make import EnvSpec
from shoal.errors import UsageError
from shoal.policies.policy import Policy
from shoal.sampling import tasks
from shoal.sampling.lane_address import LaneAddress, Ledger, LedgerEntry
from shoal.sampling.record import LaneRecord
from shoal.sampling.scores import Infos
from shoal.sampling.vector_lane import LIFE


class Span(NamedTuple):
    """A stretch of time, by `time.perf_counter`."""

    begun: float
    done: float

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.done - self.begun

    def overlap(self, other: Span) -> float:
        """Compute the seconds that two spans have in common."""
        return max(0.0, min(self.done, other.done) - max(self.begun, other.begun))


@dataclass
class Request:
    """Fragments of all lanes that were requested, and when."""

    weights: Shared
    steps: int
    futures: dict[Future[LaneRecord | None], int] = field(default_factory=dict)
    """The lane of each future."""
    begun: float = field(default_factory=time.perf_counter)
    done: float = 0.0
    """When the last result so far arrived; the caller may have been busy with something else by then."""

    def arrived(self, _: Future[LaneRecord | None]) -> None:
        """Note the time: a result is in."""
        self.done = time.perf_counter()


@dataclass
class _Slot:
    """One slot of the ledger: the number of its episode, and its actions since the reset, in pieces."""

    episode: int
    pieces: list[np.ndarray] = field(default_factory=list)


class LanesState(TypedDict):
    """All lanes as checkpoints store them."""

    rounds: int
    lanes: dict[str, Ledger]
    infos: NotRequired[dict[str, np.ndarray]]
    """`Infos`, if the environment reports any."""


class Lanes:
    """All lanes of a run."""

    def __init__(
        self,
        engine: Engine,
        env: EnvSpec,
        policy: Policy,
        seed: int,
        count: int,
        width: int,
        state: LanesState | None = None,
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.count, self.width = count, width
        self.sampled = Span(0.0, 0.0)
        """When the last batch was sampled."""
        # Tells these lanes from those of other runs, and of this run before a resume, on workers that serve both.
        self._token = os.urandom(8).hex()
        self._seed, self._env = seed, env.to_record()
        self._policy = policy.to_record()
        self._vector = env.vector is not None
        self._rounds = 0
        self._infos = Infos()
        self._ledger = [[_Slot(0) for _ in range(width)] for _ in range(count)]
        if state is not None:
            self._restore(state)
        self._told = [False] * count  # whether this head has sent the lane's ledger to a worker

    def fragments(self, weights: Shared, steps: int) -> list[LaneRecord]:
        """Play the next `steps` steps of every lane; return records in lane order."""
        return self.collect(self.request(weights, steps))

    def request(self, weights: Shared, steps: int) -> Request:
        """Request the next `steps` steps of every lane, without waiting for them."""
        request = Request(weights, steps)
        for lane in range(self.count):
            self._submit(request, lane)
        return request

    def collect(self, request: Request) -> list[LaneRecord]:
        """Wait for the requested fragments; return records in lane order."""
        futures, records = request.futures, dict[int, LaneRecord]()
        waited = not all(future.done() for future in futures)
        while futures:
            done = wait(futures, return_when=FIRST_COMPLETED).done
            for future in sorted(done, key=futures.__getitem__):
                lane, record = futures.pop(future), future.result()
                if record is None:  # the lane has moved to a worker that does not hold it
                    self._told[lane] = False
                    self._submit(request, lane)
                else:
                    records[lane] = record
        if waited or not request.done:  # a future is done a moment before it calls `arrived`
            request.done = time.perf_counter()
        self.sampled = Span(request.begun, request.done)
        for lane, record in records.items():
            self._extend(lane, record)
            if self._vector:
                self._renew(lane)
        self._rounds += 1
        ordered = [records[lane] for lane in range(self.count)]
        self._infos.add(ordered)
        return ordered

    def episodes(self, weights: Shared, steps: int) -> list[LaneRecord]:
        """Play whole episodes with at least `steps` steps in total; return records in lane order."""
        if self._vector:
            raise UsageError("native vector environments (--vector) play fragments only, and this run plays episodes")
        begun = time.perf_counter()
        budget: tasks.Budget = {"steps": -(-steps // self.count)}
        first = self._rounds * self.count
        addresses = [self._address(first + lane) for lane in range(self.count)]
        self._rounds += 1
        records = self.engine.map(tasks.episodes, addresses, self._policy, weights, budget)
        self.sampled = Span(begun, time.perf_counter())
        self._infos.add(records)
        return records

    def metrics(self) -> dict[str, float]:
        """Report what the environment says in `info` about recent episodes."""
        return self._infos.metrics()

    def state(self) -> Callable[[], LanesState]:
        """Return a function that assembles the ledger as of now. Making the function is cheap; calling it is not."""
        rounds, infos = self._rounds, self._infos.state()
        slots = [[(slot.episode, list(slot.pieces)) for slot in lane] for lane in self._ledger]

        def assemble() -> LanesState:
            state: LanesState = {
                "rounds": rounds,
                "lanes": {
                    str(lane): {str(i): self._entry(*slot) for i, slot in enumerate(entries)}
                    for lane, entries in enumerate(slots)
                },
            }
            return state | {"infos": infos} if infos else state

        return assemble

    def _address(self, lane: int) -> LaneAddress:
        return {"seed": self._seed, "purpose": "episode", "lane": lane, "width": self.width, "env": self._env}

    def _submit(self, request: Request, lane: int) -> None:
        address: LaneAddress = {**self._address(lane), "token": self._token, "fragment": self._rounds}
        ledger: Ledger | None = None
        if not self._told[lane]:
            ledger = {str(i): self._entry(slot.episode, slot.pieces) for i, slot in enumerate(self._ledger[lane])}
            self._told[lane] = True
        task = (address, self._policy, request.weights, request.steps, ledger)
        future = self.engine.submit(tasks.fragment, *task, key=f"lane {lane}")
        request.futures[future] = lane
        future.add_done_callback(request.arrived)

    def _entry(self, episode: int, pieces: Sequence[np.ndarray]) -> LedgerEntry:
        distribution = self.policy.distribution
        nothing = np.zeros((0, *distribution.action_shape), distribution.action_dtype)
        return {"episode": episode, "actions": np.concatenate([nothing, *pieces])}

    def _extend(self, lane: int, record: LaneRecord) -> None:
        actions, ends = record["actions"], record["ends"]
        if self._vector:  # what follows an end depends on what came before it
            ends = ends[:0]
        for number, slot in enumerate(self._ledger[lane]):
            times = ends[ends[:, 1] == number, 0]
            begin = 0
            if len(times):
                begin = int(times[-1]) + 1
                slot.episode += len(times)
                slot.pieces = []
            slot.pieces.append(actions[begin:, number].copy())  # a view would keep the whole message in memory

    def _renew(self, lane: int) -> None:
        """Have a vector lane re-created once its ledger is long."""
        slots = self._ledger[lane]
        if sum(map(len, slots[0].pieces)) >= LIFE:
            self._ledger[lane] = [_Slot(slot.episode + 1) for slot in slots]
            self._told[lane] = False

    def _restore(self, state: LanesState) -> None:
        self._rounds = state["rounds"]
        self._infos = Infos(state.get("infos"))
        for lane, slots in enumerate(self._ledger):
            for number, slot in enumerate(slots):
                entry = state["lanes"][str(lane)][str(number)]
                slot.episode, slot.pieces = entry["episode"], [entry["actions"]]
