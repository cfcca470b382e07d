"""Lanes, as the head sees them: which tasks make a batch, what every lane did so far, and the batch itself.

The number of lanes and their width come from the settings, never from the number of workers, and results are used in
lane order; so a batch is the same whoever computed it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.engines.wire import Shared
from shoal.envs.make import EnvSpec
from shoal.policies.policy import Policy
from shoal.sampling.lane import episodes, fragment
from shoal.sampling.vector_lane import LIFE


@dataclass
class _Slot:
    """One line of the ledger: which episode a slot is in, and its actions since the reset, in pieces."""

    episode: int
    pieces: list[np.ndarray] = field(default_factory=list)


@dataclass
class Asked:
    """Fragments of all lanes that were asked for, and when."""

    weights: Shared
    steps: int
    lanes: dict[Future[Any], int] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)
    done: float = 0.0
    """When the last one so far came; who asked may have done something else meanwhile."""

    def came(self, _: Future[Any]) -> None:
        """One came."""
        self.done = time.perf_counter()


class Lanes:
    """All lanes of a run, and the ledger from which any worker can rebuild any of them."""

    def __init__(
        self,
        engine: Engine,
        env: EnvSpec,
        policy: Policy,
        seed: int,
        count: int,
        width: int,
        state: Tree | None = None,
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.count, self.width = count, width
        # Tells this head's lanes from those of other runs, and of this run before a resume, on workers that serve both.
        token = os.urandom(8).hex()
        self._place = {
            "token": token,
            "seed": seed,
            "purpose": "episode",
            "width": width,
            "env": env.to_tree(),
        }
        self._policy = policy.to_tree()
        self._vector = env.vector is not None
        self._rounds = 0
        self._ledger = [[_Slot(0) for _ in range(width)] for _ in range(count)]
        if state is not None:
            self._restore(state)
        self._told = [False] * count  # whether some worker was told the lane's ledger by this head

    def fragments(self, weights: Shared, steps: int) -> list[Tree]:
        """The next `steps` steps of every lane: records in lane order."""
        return self.take(self.ask(weights, steps))

    def ask(self, weights: Shared, steps: int) -> Asked:
        """Begin the next `steps` steps of every lane, and do not wait for them."""
        asked = Asked(weights, steps)
        for lane in range(self.count):
            self._ask(asked, lane)
        return asked

    def take(self, asked: Asked) -> list[Tree]:
        """Wait for what was asked for: records in lane order."""
        lanes, records = asked.lanes, dict[int, Tree]()
        waited = not all(future.done() for future in lanes)
        while lanes:
            done = wait(lanes, return_when=FIRST_COMPLETED).done
            for future in sorted(done, key=lanes.__getitem__):
                lane, record = lanes.pop(future), future.result()
                if record is None:  # the lane has moved to a worker that does not hold it
                    self._told[lane] = False
                    self._ask(asked, lane)
                else:
                    records[lane] = record
        if waited or not asked.done:  # a future is done a moment before it says so to `came`
            asked.done = time.perf_counter()
        for lane, record in records.items():
            self._extend(lane, record)
            if self._vector:
                self._renew(lane)
        self._rounds += 1
        return [records[lane] for lane in range(self.count)]

    def episodes(self, weights: Shared, steps: int) -> list[Tree]:
        """Whole episodes, at least `steps` steps of them in all: records in lane order."""
        budget = {"steps": -(-steps // self.count)}
        first = self._rounds * self.count
        places = [self._place | {"lane": first + lane} for lane in range(self.count)]
        self._rounds += 1
        return self.engine.map(episodes, places, self._policy, weights, budget)

    def state(self) -> Callable[[], Tree]:
        """A function that gives the ledger as it is now, as a tree. Cheap to make, so that it can be made often."""
        rounds = self._rounds
        slots = [[(slot.episode, list(slot.pieces)) for slot in lane] for lane in self._ledger]
        return lambda: {
            "rounds": rounds,
            "lanes": {
                str(lane): {str(i): self._entry(*slot) for i, slot in enumerate(entries)}
                for lane, entries in enumerate(slots)
            },
        }

    def _ask(self, asked: Asked, lane: int) -> None:
        place = self._place | {"lane": lane, "fragment": self._rounds}
        ledger = None
        if not self._told[lane]:
            ledger = {str(i): self._entry(slot.episode, slot.pieces) for i, slot in enumerate(self._ledger[lane])}
            self._told[lane] = True
        key = f"lane {lane}"
        future = self.engine.submit(fragment, place, self._policy, asked.weights, asked.steps, ledger, key=key)
        asked.lanes[future] = lane
        future.add_done_callback(asked.came)

    def _entry(self, episode: int, pieces: Sequence[np.ndarray]) -> Tree:
        head = self.policy.head
        nothing = np.zeros((0, *head.action_shape), head.action_dtype)
        return {"episode": episode, "actions": np.concatenate([nothing, *pieces])}

    def _extend(self, lane: int, record: Tree) -> None:
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
        """Have a vector lane made anew once its ledger is long."""
        slots = self._ledger[lane]
        if sum(map(len, slots[0].pieces)) >= LIFE:
            self._ledger[lane] = [_Slot(slot.episode + 1) for slot in slots]
            self._told[lane] = False

    def _restore(self, state: Tree) -> None:
        self._rounds = state["rounds"]
        for lane, slots in enumerate(self._ledger):
            for number, slot in enumerate(slots):
                entry = state["lanes"][str(lane)][str(number)]
                slot.episode, slot.pieces = entry["episode"], [entry["actions"]]
