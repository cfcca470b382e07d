"""All seed arithmetic. Seeds are derived from what they are for, never drawn from a running generator.

Every stream is keyed by (run seed, purpose, coordinates), so it does not matter which worker asks, in which order,
or how often. The key is a hash of them: twenty times faster than NumPy's SeedSequence, which showed in short episodes.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

# Part of every run for ever: another name gives other streams.
PURPOSES = (
    "weights", "value", "learn", "episode", "episode-act", "evaluate", "evaluate-act", "replay", "rank", "noise",
    "direction", "fitness", "ask",
)  # fmt: skip

MAX_SEED = 2**63 - 1


def _key(seed: int, purpose: str, coordinates: tuple[int, ...]) -> int:
    if purpose not in PURPOSES:
        raise ValueError(f"{purpose!r} is not one of {PURPOSES}")
    content = struct.pack(f"<{1 + len(coordinates)}q", seed, *coordinates)
    return int.from_bytes(hashlib.blake2b(content, digest_size=16, person=purpose.encode()).digest(), "little")


def rng(seed: int, purpose: str, *coordinates: int) -> np.random.Generator:
    """A generator of its own for one purpose at one place (lane, slot, episode, iteration, ...)."""
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, coordinates)))


def integer(seed: int, purpose: str, *coordinates: int) -> int:
    """A derived seed in [0, 2**31), for `env.reset(seed=...)`: some environments keep it in a C int."""
    return _key(seed, purpose, coordinates) >> 97
