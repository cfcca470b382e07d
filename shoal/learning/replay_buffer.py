"""The replay buffer: the newest steps of all slots in arrays of a fixed size, drawn from at random. NumPy, on the head.

A row is one step of every slot, because all slots take the same number of steps in a round; rows are a ring. An
observation is stored once: what followed a step stands in the next row, and one row more than there are steps holds
what is acted on next. Only where an episode was cut off does the next row belong to another episode; the observation
that it ended with is kept beside. Nothing that was there at the end of a round is overwritten by the next round, so
a state can be written out at any time until then.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.base.memory import format_bytes
from shoal.base.trees import Tree
from shoal.errors import UsageError

log = logging.getLogger("shoal.buffer")

TERMINATED, CUT = 1, 2  # how an episode ended at a step; 0: it went on


@dataclass(frozen=True)
class Layout:
    """How large a buffer is, known before any of it is allocated."""

    size: int
    """Steps that can be drawn, at least."""
    slots: int
    round_rows: int
    """Steps that each slot takes in a round."""
    shape: tuple[int, ...]
    dtype: str
    """Of one observation, as the environment gives it."""
    prioritised: bool = False

    @property
    def rows(self) -> int:
        """Steps of each slot that can be drawn."""
        return -(-self.size // self.slots)

    @property
    def ring(self) -> int:
        """Rows in memory: a round more, so that one can be written while the state before it is still whole."""
        return self.rows + self.round_rows + 1

    @property
    def step_bytes(self) -> int:
        """Bytes of one step: observation, action, reward, and whether an episode ended."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize + 4 + 4 + 1

    @property
    def bytes(self) -> int:
        """Bytes of the whole buffer, but for one observation more for each episode in it that was cut off."""
        tree = 16 * _power_of_two(self.ring * self.slots) if self.prioritised else 0
        return self.ring * self.slots * self.step_bytes + tree

    def check(self, available: int | None) -> None:
        """Say how much memory the buffer takes, and refuse one that does not fit into what is `available`."""
        # A checkpoint holds the buffer: put in order, as the bytes of each array, and as one block.
        peak = 4 * self.bytes
        needs = f"the replay buffer of {self.size:,} steps takes {format_bytes(self.bytes)} ({self.step_bytes:,} bytes a step)"
        _say(f"{needs}, and {format_bytes(peak)} in all while a checkpoint is written")
        if available is not None and peak > available:
            fits = int(self.size * 0.9 * available / peak)
            raise UsageError(
                f"{needs}, and {format_bytes(peak)} in all while a checkpoint is written, but this machine has "
                f"{format_bytes(available)} available. Use a smaller one: --buffer-size {fits}"
            )


class Transitions(NamedTuple):
    """From one observation to another, with what happened between: arrays of one shape (...) in front."""

    observations: np.ndarray
    actions: np.ndarray
    """int32"""
    returns: np.ndarray
    """Discounted sum of the rewards until the next observation, float32."""
    following: np.ndarray
    """The observation n steps later, or the last one of an episode that ended before."""
    discounts: np.ndarray
    """What the value of `following` counts: 0 after a termination, float32."""
    weights: np.ndarray
    """What makes up for being drawn more often than others: 1 unless the buffer is prioritised. float32."""


class ReplayBuffer:
    """The last `layout.size` steps, and transitions of up to `n_step` steps drawn from them."""

    def __init__(
        self, layout: Layout, gamma: float, n_step: int = 1, alpha: float = 0.0, beta: float = 0.0,
        state: Tree | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.n_step, self.alpha, self.beta = layout, n_step, alpha, beta
        self._powers = (gamma ** np.arange(n_step + 1)).astype(np.float32)
        places = layout.ring * layout.slots
        # Row r of slot s stands at (r % ring) * slots + s, in all of these.
        self._observations = np.zeros((places, *layout.shape), layout.dtype)
        self._actions = np.zeros(places, np.int32)
        self._rewards = np.zeros(places, np.float32)
        self._ends = np.zeros(places, np.uint8)
        self._finals = _Finals(layout.shape, layout.dtype)
        self._tree = SumTree(places) if layout.prioritised else None
        self._top = 1.0  # the highest priority so far, which new steps get
        self.written = 0
        """Rows written since the run began."""
        if state is not None:
            self._restore(state)

    @property
    def steps(self) -> int:
        """Environment steps written since the run began."""
        return self.written * self.layout.slots

    @property
    def starts(self) -> tuple[int, int]:
        """First row that a transition can begin at, and how many rows there are from it on."""
        oldest = max(0, self.written - self.layout.rows)
        return oldest, max(0, self.written - self.n_step + 1 - oldest)

    def add(self, records: Sequence[Tree]) -> None:
        """Write one round: the records of all lanes, in lane order (see `lanes.Record`)."""
        layout, first = self.layout, self.written
        rows = np.arange(first, first + layout.round_rows + 1) % layout.ring
        observations = self._observations.reshape(layout.ring, layout.slots, *layout.shape)
        columns = {"actions": self._actions, "rewards": self._rewards}
        grids = {name: flat.reshape(layout.ring, layout.slots) for name, flat in columns.items()}
        ends = self._ends.reshape(layout.ring, layout.slots)
        ends[rows[:-1]] = 0
        keys, finals = [], []
        at = 0
        for record in records:
            here = slice(at, at + record["rewards"].shape[1])
            observations[rows, here] = record["observations"]
            grids["actions"][rows[:-1], here] = record["actions"][..., 0]
            grids["rewards"][rows[:-1], here] = record["rewards"]
            times, slots, cut = record["ends"][:, 0].astype(np.int64), record["ends"][:, 1] + at, ~record["terminated"]
            ends[rows[times], slots] = np.where(cut, CUT, TERMINATED)
            keys.append((first + times[cut]) * layout.slots + slots[cut])
            finals.append(record["finals"][cut])
            at = here.stop
        startable = self.starts
        self._finals.add(np.concatenate(keys), np.concatenate(finals), startable[0] * layout.slots)
        self.written = first + layout.round_rows
        if self._tree is not None:
            self._offer(startable)

    def draw(self, rng: np.random.Generator, steps: int, batch: int) -> tuple[Transitions, np.ndarray]:
        """Transitions (steps, batch) for many gradient steps at once, all from the buffer as it is now.

        The second array says where they stand, for `reweigh`.
        """
        first, count = self.starts
        slots = self.layout.slots
        if self._tree is None:
            rows, slot = np.divmod(rng.integers(0, count * slots, (steps, batch)), slots)
            rows += first
            return self.transitions(rows, slot), rows % self.layout.ring * slots + slot
        places, chances = self._tree.draw(rng, steps, batch)
        rows, slot = np.divmod(places, slots)
        # Of all rows that ever stood there, the newest one that a transition can begin at.
        newest = first + count - 1
        rows = newest - (newest - rows) % self.layout.ring
        weights = (count * slots * chances) ** -self.beta
        weights /= weights.max(axis=1, keepdims=True)
        return self.transitions(rows, slot)._replace(weights=weights.astype(np.float32)), places

    def transitions(self, rows: np.ndarray, slots: np.ndarray) -> Transitions:
        """The transitions that begin at these rows of these slots, which must be in the buffer."""
        width, size = self.layout.slots, self.layout.ring * self.layout.slots
        begin = rows * width + slots
        places = begin % size
        returns = self._rewards[places]
        going = self._ends[places] == 0
        last = begin
        for step in range(1, self.n_step):
            following = begin + step * width
            at = following % size
            returns = returns + np.where(going, self._powers[step] * self._rewards[at], np.float32(0))
            last = np.where(going, following, last)
            going &= self._ends[at] == 0
        end = self._ends[last % size]
        next_observations = self._observations[(last + width) % size]
        cut = end == CUT
        if cut.any():
            next_observations[cut] = self._finals.find(last[cut])
        return Transitions(
            observations=self._observations[places],
            actions=self._actions[places],
            returns=returns,
            following=next_observations,
            discounts=np.where(end == TERMINATED, np.float32(0), self._powers[(last - begin) // width + 1]),
            weights=np.ones(rows.shape, np.float32),
        )

    def reweigh(self, places: np.ndarray, errors: np.ndarray) -> None:
        """Set the priorities of drawn transitions from the size of their errors; of equals, the last one counts."""
        if self._tree is None:
            raise ValueError("this buffer has no priorities")
        priorities = (np.abs(errors.astype(np.float64)) + 1e-6) ** self.alpha
        self._top = max(self._top, float(priorities.max()))
        self._tree.set(places.ravel(), priorities.ravel())

    def _offer(self, before: tuple[int, int]) -> None:
        """Give rows that can now be drawn the highest priority, and those that no longer can none."""
        if self._tree is None:
            return
        (old_first, old_count), (first, count) = before, self.starts
        gone = np.arange(old_first, first)
        come = np.arange(max(first, old_first + old_count), first + count)
        priorities = np.repeat([0.0, self._top], [len(gone), len(come)])
        rows = np.concatenate([gone, come]) % self.layout.ring
        places = rows[:, None] * self.layout.slots + np.arange(self.layout.slots)
        self._tree.set(places.ravel(), np.repeat(priorities, self.layout.slots))

    def state(self) -> Callable[[], Tree]:
        """A function that gives all of the buffer as it is now, oldest row first. Good until the next but one `add`."""
        written, oldest, top = self.written, self.starts[0], self._top
        finals = self._finals.since(oldest * self.layout.slots)
        priorities = None if self._tree is None else self._tree.leaves.copy()

        def tree() -> Tree:
            rows = np.arange(oldest, written + 1) % self.layout.ring
            state: Tree = {
                "written": written,
                "observations": self._by_row(self._observations)[rows],
                "actions": self._by_row(self._actions)[rows[:-1]],
                "rewards": self._by_row(self._rewards)[rows[:-1]],
                "ends": self._by_row(self._ends)[rows[:-1]],
                "final_keys": finals[0],
                "finals": finals[1],
            }
            if priorities is not None:
                places = priorities[: self.layout.ring * self.layout.slots]
                state |= {"priorities": self._by_row(places)[rows[:-1]], "top": top}
            return state

        return tree

    def _restore(self, state: Tree) -> None:
        self.written = state["written"]
        rows = np.arange(self.written - len(state["actions"]), self.written + 1) % self.layout.ring
        self._by_row(self._observations)[rows] = state["observations"]
        self._by_row(self._actions)[rows[:-1]] = state["actions"]
        self._by_row(self._rewards)[rows[:-1]] = state["rewards"]
        self._by_row(self._ends)[rows[:-1]] = state["ends"]
        self._finals.add(state["final_keys"], state["finals"], 0)
        if self._tree is not None:
            self._top = state["top"]
            places = rows[:-1, None] * self.layout.slots + np.arange(self.layout.slots)
            self._tree.set(places.ravel(), state["priorities"].ravel())

    def _by_row(self, flat: np.ndarray) -> np.ndarray:
        return flat.reshape(self.layout.ring, self.layout.slots, *flat.shape[1:])


class _Finals:
    """Observations that episodes ended with when they were cut off, by row * slots + slot of their last step."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self._keys = np.zeros(16, np.int64)  # in rising order
        self._observations = np.zeros((16, *shape), dtype)
        self._count = 0

    def add(self, keys: np.ndarray, observations: np.ndarray, oldest: int) -> None:
        """Append. When there is no room left, those before `oldest` go, and the rest moves to larger arrays."""
        if self._count + len(keys) > len(self._keys):
            kept_keys, kept = self.since(oldest)
            self._count = len(kept_keys)
            room = 2 * (self._count + len(keys))
            self._keys = np.zeros(room, np.int64)
            self._observations = np.zeros((room, *kept.shape[1:]), kept.dtype)
            self._keys[: self._count], self._observations[: self._count] = kept_keys, kept
        end = self._count + len(keys)
        order = np.argsort(keys)
        self._keys[self._count : end], self._observations[self._count : end] = keys[order], observations[order]
        self._count = end

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The observations of these keys."""
        found: np.ndarray = self._observations[np.searchsorted(self._keys[: self._count], keys)]
        return found

    def since(self, oldest: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and observations from `oldest` on, as views: what is appended later leaves them as they are."""
        first = int(np.searchsorted(self._keys[: self._count], oldest))
        return self._keys[first : self._count], self._observations[first : self._count]


class SumTree:
    """Priorities of places, with the sum of any range a few additions away. A node is always the sum of its children,
    computed anew, so that the same priorities make the same tree however they came about."""

    def __init__(self, places: int) -> None:
        self._size = _power_of_two(places)
        self._nodes = np.zeros(2 * self._size)  # node 1 is the root; the children of node i are 2 i and 2 i + 1

    @property
    def leaves(self) -> np.ndarray:
        """Priority of each place; 0 for those that cannot be drawn."""
        return self._nodes[self._size :]

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[1])

    def set(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Change priorities; of equal places the last one counts."""
        at = places + self._size
        self._nodes[at] = priorities
        while len(at) and at[0] > 1:  # all places are equally deep
            at = at >> 1
            self._nodes[at] = self._nodes[2 * at] + self._nodes[2 * at + 1]

    def draw(self, rng: np.random.Generator, steps: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Places (steps, batch) drawn in proportion to their priorities, and the chance that each had.

        Each minibatch draws one from each of `batch` equal parts of the total, which spreads it evenly.
        """
        wanted = (np.arange(batch) + rng.random((steps, batch))) * (self.total / batch)
        at = np.ones((steps, batch), np.int64)
        while at[0, 0] < self._size:
            left = self._nodes[2 * at]
            # Rounding may ask for a little more than there is; never go where nothing is.
            right = (wanted >= left) & (self._nodes[2 * at + 1] > 0)
            wanted = np.where(right, wanted - left, wanted)
            at = 2 * at + right
        return at - self._size, self._nodes[at] / self.total


@functools.cache
def _say(line: str) -> None:
    """Once in a process, however often a run is started in it."""
    log.info("%s", line)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
