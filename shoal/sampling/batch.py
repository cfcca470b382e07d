"""The batch that the learner receives, assembled from the records of all lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from shoal.base.moments import Moments
from shoal.sampling.record import LaneRecord


class Batch(TypedDict):
    """T steps of N slots, in lane order."""

    observations: np.ndarray
    """(T+1, N, ...)."""
    actions: np.ndarray
    """(T, N, components)."""
    rewards: np.ndarray
    """(T, N) float32."""
    weights: np.ndarray
    """(T, N) float32: 1 where a slot took a step, 0 for padding and for steps spent on a reset."""
    terminated: np.ndarray
    """(T, N) bool."""
    ended: np.ndarray
    """(T, N) bool: terminated or truncated."""
    finals: np.ndarray
    """(K, ...): final observations of truncated episodes, padded."""
    finals_at: np.ndarray
    """(K,) int32: index of their step in the flat (T * N) batch; T * N for padding."""


def make_batch(records: Sequence[LaneRecord]) -> Batch:
    """Assemble a batch. T and K are rounded up, so that few different shapes have to be compiled."""
    steps = np.concatenate([record["steps"] for record in records])
    width = len(records[0]["steps"])
    longest, slots = int(steps.max()), len(steps)
    time = longest if (steps == longest).all() else _rounded(longest)
    shape = records[0]["observations"].shape[2:]
    observations = np.zeros((time + 1, slots, *shape), records[0]["observations"].dtype)
    actions = np.zeros((time, slots, *records[0]["actions"].shape[2:]), records[0]["actions"].dtype)
    rewards = np.zeros((time, slots), np.float32)
    terminated = np.zeros((time, slots), bool)
    ended = np.zeros((time, slots), bool)
    weights = (np.arange(time)[:, None] < steps).astype(np.float32)
    finals, finals_at = [], []
    for lane, record in enumerate(records):
        length, here = len(record["rewards"]), slice(lane * width, (lane + 1) * width)
        observations[: length + 1, here] = record["observations"]
        actions[:length, here] = record["actions"]
        rewards[:length, here] = record["rewards"]
        times, columns = record["ends"][:, 0], record["ends"][:, 1] + lane * width
        ended[times, columns] = True
        terminated[times, columns] = record["terminated"]
        weights[record["skipped"][:, 0], record["skipped"][:, 1] + lane * width] = 0.0
        cut = ~record["terminated"]
        finals.append(record["finals"][cut])
        finals_at.append(times[cut] * slots + columns[cut])
    found = np.concatenate(finals)
    room = slots
    while room < len(found):
        room *= 2
    padded = np.zeros((room, *shape), observations.dtype)
    padded[: len(found)] = found
    padded_at = np.full(room, time * slots, np.int32)
    padded_at[: len(found)] = np.concatenate(finals_at)
    return {
        "observations": observations,
        "actions": actions,
        "rewards": rewards,
        "weights": weights,
        "terminated": terminated,
        "ended": ended,
        "finals": padded,
        "finals_at": padded_at,
    }


def minibatch_orders(rng: np.random.Generator, batch: Batch, epochs: int, minibatch: int) -> np.ndarray:
    """Shuffle the samples of a flat batch into minibatches (epochs, minibatches, size), each sample once per epoch.

    Samples that do not fill a minibatch are left out. Shuffling in XLA would cost a quarter of an update.
    """
    count = batch["rewards"].size
    size = min(minibatch, count)
    shuffled = rng.permuted(np.tile(np.arange(count, dtype=np.int32), (epochs, 1)), axis=1)
    return shuffled[:, : count // size * size].reshape(epochs, count // size, size)


def _rounded(length: int) -> int:
    """Round up to one of 16, 24, 32, 48, 64, 96, ...: at most half is padding, and few lengths occur."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def merged_moments(moments: Moments, records: Sequence[LaneRecord]) -> Moments:
    """Add the moments of records, in lane order."""
    for record in records:
        moments = moments.merge(Moments.from_record(record["moments"]))
    return moments
