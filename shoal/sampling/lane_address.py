"""Where a lane is and how to rebuild it: what the head sends along with every sampling task."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import numpy as np

from shoal.base import seeding
from shoal.envs.make import EnvRecord


class LaneAddress(TypedDict):
    """Which lane of which run a task is about. It determines the seed of every episode in the lane."""

    seed: int
    """Seed of the run."""
    purpose: str
    """Purpose of the episode seeds: "episode", "evaluate", "eval-in-training" or "fitness"."""
    lane: int
    width: int
    env: EnvRecord
    token: NotRequired[str]
    """Tells the lanes of different heads apart on workers that serve several. Fragments only."""
    fragment: NotRequired[int]
    """Number of fragments before this one. Fragments only."""


class LedgerEntry(TypedDict):
    """How to rebuild one slot: reset with the seed of this episode, then step these actions."""

    episode: int
    actions: np.ndarray
    """(steps since the reset, components)."""


Ledger = dict[str, LedgerEntry]
"""The ledger of a lane: slot -> entry. The slot is a string because checkpoints store ledgers as trees."""


def episode_seed(address: LaneAddress, slot: int, episode: int) -> int:
    """Derive the seed with which the environment of a slot is reset for an episode."""
    return seeding.integer(address["seed"], address["purpose"], address["lane"], slot, episode)
