"""The replay buffer: the newest steps of all slots, in NumPy arrays of a fixed size on the head.

A row is one step of every slot, since all slots take the same number of steps in a round. The rows form a ring buffer.
Each observation is stored once: the next observation of a step is in the next row, and one extra row holds the
observations to act on next. Where an episode was truncated the next row belongs to another episode, so final
observations of truncated episodes are stored separately. A round never overwrites rows that were valid when the round
before it ended, so a state can still be written out while the next round is added.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from shoal.base.memory import format_bytes
from shoal.errors import UsageError

log = logging.getLogger("shoal.buffer")

TERMINATED, TRUNCATED = 1, 2  # how an episode ended at a step; 0: it continued


@dataclass(frozen=True)
class Layout:
    """The dimensions of a buffer, known before any of it is allocated."""

    size: int
    """Capacity: the minimum number of steps that can be drawn, once it is full."""
    slots: int
    round_rows: int
    """Steps per slot and round."""
    shape: tuple[int, ...]
    """Of one observation."""
    dtype: str
    """Of observations."""
    prioritised: bool = False

    @property
    def rows(self) -> int:
        """Steps per slot that can be drawn."""
        return -(-self.size // self.slots)

    @property
    def ring(self) -> int:
        """Rows in memory: a round more, so that adding one leaves the previous state intact."""
        return self.rows + self.round_rows + 1

    @property
    def step_bytes(self) -> int:
        """Bytes per step: observation, action, reward and how the episode ended, if it did."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize + 4 + 4 + 1

    @property
    def bytes(self) -> int:
        """Bytes of the whole buffer, without the final observations of truncated episodes."""
        tree = 16 * _power_of_two(self.ring * self.slots) if self.prioritised else 0
        return self.ring * self.slots * self.step_bytes + tree

    def check(self, available: int | None) -> None:
        """Log how much memory the buffer takes, and raise if it exceeds the `available` bytes."""
        # A checkpoint makes three copies: rows in order, the bytes of each array, and one block of all of them.
        peak = 4 * self.bytes
        needs = (
            f"the replay buffer of {self.size:,} steps takes {format_bytes(self.bytes)} "
            f"({self.step_bytes:,} bytes a step), and {format_bytes(peak)} in all while a checkpoint is written"
        )
        _log_once(needs)
        if available is not None and peak > available:
            fits = int(self.size * 0.9 * available / peak)
            raise UsageError(
                f"{needs}, but this machine has {format_bytes(available)} available. "
                f"Use a smaller one: --buffer-size {fits}"
            )


class Transitions(NamedTuple):
    """n-step transitions: arrays with the same leading dimensions (...)."""

    observations: np.ndarray
    """(..., *shape)"""
    actions: np.ndarray
    """(...) int32"""
    returns: np.ndarray
    """(...) float32: discounted sum of the rewards before `following`."""
    following: np.ndarray
    """(..., *shape): the observation n steps later, or the final one of an episode that ended earlier."""
    discounts: np.ndarray
    """(...) float32: factor of the value of `following`; 0 after a termination."""
    weights: np.ndarray
    """(...) float32: importance-sampling weights; 1 unless the buffer is prioritised."""


class BufferState(TypedDict):
    """The buffer's part of a checkpoint: `rows` steps of `slots` slots, oldest row first."""

    written: int
    """Rows written since the run began."""
    observations: np.ndarray
    """(rows + 1, slots, *shape): the last row is what will be acted on next."""
    actions: np.ndarray
    """(rows, slots) int32"""
    rewards: np.ndarray
    """(rows, slots) float32"""
    ends: np.ndarray
    """(rows, slots) uint8: 0, TERMINATED or TRUNCATED"""
    final_keys: np.ndarray
    """(n,) int64: row * slots + slot of the last step of each truncated episode, ascending"""
    finals: np.ndarray
    """(n, *shape): final observations of these episodes"""
    priorities: NotRequired[np.ndarray]
    """(rows, slots) float64, if the buffer is prioritised"""
    top: NotRequired[float]
    """The highest priority so far, if the buffer is prioritised."""


class ReplayBuffer:
    """The last `layout.size` steps, from which transitions of up to `n_step` steps are drawn."""

    def __init__(
        self, layout: Layout, gamma: float, n_step: int = 1, alpha: float = 0.0, beta: float = 0.0,
        state: BufferState | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.n_step, self.alpha, self.beta = layout, n_step, alpha, beta
        self._powers = (gamma ** np.arange(n_step + 1)).astype(np.float32)
        places = layout.ring * layout.slots
        # Row r of slot s is at index (r % ring) * slots + s in each of these.
        self._observations = np.zeros((places, *layout.shape), layout.dtype)
        self._actions = np.zeros(places, np.int32)
        self._rewards = np.zeros(places, np.float32)
        self._ends = np.zeros(places, np.uint8)
        self._finals = _Finals(layout.shape, layout.dtype)
        self._tree = SumTree(places) if layout.prioritised else None
        self._top = 1.0  # the highest priority so far, given to new steps
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
        """First row at which a transition can begin, and the number of such rows."""
        oldest = max(0, self.written - self.layout.rows)
        return oldest, max(0, self.written - self.n_step + 1 - oldest)

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add one round: the records of all lanes, in lane order (see `shoal.sampling.record`)."""
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
            ends[rows[times], slots] = np.where(cut, TRUNCATED, TERMINATED)
            keys.append((first + times[cut]) * layout.slots + slots[cut])
            finals.append(record["finals"][cut])
            at = here.stop
        startable = self.starts
        self._finals.add(np.concatenate(keys), np.concatenate(finals), startable[0] * layout.slots)
        self.written = first + layout.round_rows
        if self._tree is not None:
            self._offer(startable)

    def draw(self, rng: np.random.Generator, steps: int, batch: int) -> tuple[Transitions, np.ndarray]:
        """Draw transitions (steps, batch) for several gradient steps at once.

        The second array (steps, batch) is their indices in the buffer, for `reweigh`.
        """
        first, count = self.starts
        slots = self.layout.slots
        if self._tree is None:
            rows, slot = np.divmod(rng.integers(0, count * slots, (steps, batch)), slots)
            rows += first
            return self.transitions(rows, slot), rows % self.layout.ring * slots + slot
        places, chances = self._tree.draw(rng, steps, batch)
        rows, slot = np.divmod(places, slots)
        # Of all rows that were ever stored at that index, the newest at which a transition can begin.
        newest = first + count - 1
        rows = newest - (newest - rows) % self.layout.ring
        weights = (count * slots * chances) ** -self.beta
        weights /= weights.max(axis=1, keepdims=True)
        return self.transitions(rows, slot)._replace(weights=weights.astype(np.float32)), places

    def transitions(self, rows: np.ndarray, slots: np.ndarray) -> Transitions:
        """Return the transitions that begin at these rows of these slots, which must be in the buffer."""
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
        cut = end == TRUNCATED
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
        """Set the priorities of drawn transitions from their TD errors; the last one wins among duplicates."""
        if self._tree is None:
            raise ValueError("this buffer is not prioritised")
        priorities = (np.abs(errors.astype(np.float64)) + 1e-6) ** self.alpha
        self._top = max(self._top, float(priorities.max()))
        self._tree.set(places.ravel(), priorities.ravel())

    def _offer(self, before: tuple[int, int]) -> None:
        """Give rows that can now be drawn the highest priority, and those that no longer can priority 0."""
        if self._tree is None:
            return
        (old_first, old_count), (first, count) = before, self.starts
        gone = np.arange(old_first, first)
        new = np.arange(max(first, old_first + old_count), first + count)
        priorities = np.repeat([0.0, self._top], [len(gone), len(new)])
        rows = np.concatenate([gone, new]) % self.layout.ring
        places = rows[:, None] * self.layout.slots + np.arange(self.layout.slots)
        self._tree.set(places.ravel(), np.repeat(priorities, self.layout.slots))

    def state(self) -> Callable[[], BufferState]:
        """Return a function that copies the buffer as it is now. It stays valid until the second `add` from now."""
        written, oldest, top = self.written, self.starts[0], self._top
        finals = self._finals.since(oldest * self.layout.slots)
        priorities = None if self._tree is None else self._tree.leaves.copy()

        def tree() -> BufferState:
            rows = np.arange(oldest, written + 1) % self.layout.ring
            state: BufferState = {
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
                state["priorities"], state["top"] = self._by_row(places)[rows[:-1]], top
            return state

        return tree

    def _restore(self, state: BufferState) -> None:
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
    """Final observations of truncated episodes, by row * slots + slot of their last step."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self._keys = np.zeros(16, np.int64)  # ascending
        self._observations = np.zeros((16, *shape), dtype)
        self._count = 0

    def add(self, keys: np.ndarray, observations: np.ndarray, oldest: int) -> None:
        """Append. If there is no room left, drop keys below `oldest` and move the rest to larger arrays."""
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
        """Look up the observations of these keys."""
        found: np.ndarray = self._observations[np.searchsorted(self._keys[: self._count], keys)]
        return found

    def since(self, oldest: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the keys and observations from `oldest` on, which later additions leave unchanged."""
        first = int(np.searchsorted(self._keys[: self._count], oldest))
        return self._keys[first : self._count], self._observations[first : self._count]


class SumTree:
    """Priorities of places in a binary tree of partial sums, to draw from in logarithmic time.

    A change recomputes each node above it as the sum of its two children, so that equal priorities give the same bits
    in every node, whatever the order of the changes.
    """

    def __init__(self, places: int) -> None:
        self._size = _power_of_two(places)
        self._nodes = np.zeros(2 * self._size)  # node 1 is the root; the children of node i are 2 i and 2 i + 1

    @property
    def leaves(self) -> np.ndarray:
        """Priority of each place, padded to a power of two; 0 for places that cannot be drawn."""
        return self._nodes[self._size :]

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def set(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Change priorities; the last one wins among duplicate places."""
        at = places + self._size
        self._nodes[at] = priorities
        while len(at) and at[0] > 1:  # all leaves have the same depth
            at = at >> 1
            self._nodes[at] = self._nodes[2 * at] + self._nodes[2 * at + 1]

    def draw(self, rng: np.random.Generator, steps: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw places (steps, batch) in proportion to their priorities; also return their probabilities.

        Sampling is stratified: each minibatch draws one place from each of `batch` equal parts of the total.
        """
        wanted = (np.arange(batch) + rng.random((steps, batch))) * (self.total / batch)
        at = np.ones((steps, batch), np.int64)
        while at[0, 0] < self._size:
            left = self._nodes[2 * at]
            # Rounding may exceed the total slightly; never descend to a node without priority.
            right = (wanted >= left) & (self._nodes[2 * at + 1] > 0)
            wanted = np.where(right, wanted - left, wanted)
            at = 2 * at + right
        return at - self._size, self._nodes[at] / self.total


@functools.cache
def _log_once(line: str) -> None:
    """Log a line once per process, even if several runs are started in it."""
    log.info("%s", line)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
