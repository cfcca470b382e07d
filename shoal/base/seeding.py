"""All seed arithmetic. A seed is derived from its purpose, never drawn from a running generator.

Every stream is keyed by (run seed, purpose, coordinates), so the result does not depend on which worker asks, in which
order, or how often. The key is a hash of these: twenty times faster than NumPy's SeedSequence, which slowed short
episodes measurably.

An algorithm outside Shoal has its own purposes, spelled `algorithm/purpose`, such as `a2c/dropout`.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

# Never rename these: a different name gives a different stream, so existing runs could not be reproduced.
PURPOSES = (
    "weights", "value", "learn", "episode", "episode-act", "evaluate", "evaluate-act", "replay", "rank", "noise",
    "direction", "fitness", "ask", "eval-in-training",
)  # fmt: skip

MAX_SEED = 2**63 - 1


_USER = b"user"  # keeps the streams of users' algorithms apart from Shoal's own


def _key(seed: int, purpose: str, coordinates: tuple[int, ...]) -> int:
    content = struct.pack(f"<{1 + len(coordinates)}q", seed, *coordinates)
    person = purpose.encode()
    if purpose not in PURPOSES:
        algorithm, _, name = purpose.partition("/")
        if not (algorithm and name):
            raise ValueError(
                f"{purpose!r} is not one of Shoal's purposes ({', '.join(PURPOSES)}). A purpose of your own contains "
                f"the name of your algorithm: 'a2c/{purpose or 'noise'}'"
            )
        content, person = content + person, _USER
    return int.from_bytes(hashlib.blake2b(content, digest_size=16, person=person).digest(), "little")


def rng(seed: int, purpose: str, *coordinates: int) -> np.random.Generator:
    """Create the generator for one purpose at some coordinates (lane, slot, episode, iteration, ...)."""
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, coordinates)))


def integer(seed: int, purpose: str, *coordinates: int) -> int:
    """Derive a seed in [0, 2**31) for `env.reset(seed=...)`: some environments store it in a C int."""
    return _key(seed, purpose, coordinates) >> 97
