"""All seed arithmetic. Seeds are derived from what they are for, never drawn from a running generator.

Every stream is keyed by (run seed, purpose, coordinates), so it does not matter which worker asks, in which order,
or how often.
"""

from __future__ import annotations

import numpy as np

# A purpose is part of the key for ever: changing a number here changes every run.
PURPOSES = {
    "weights": 1,
    "value": 2,
    "learn": 3,
    "episode": 4,
    "episode-act": 5,
    "evaluate": 6,
    "evaluate-act": 7,
}

MAX_SEED = 2**32 - 1


def sequence(seed: int, purpose: str, *coordinates: int) -> np.random.SeedSequence:
    """The seed sequence of one purpose at one place (lane, slot, episode, iteration, ...)."""
    return np.random.SeedSequence([seed, PURPOSES[purpose], *coordinates])


def rng(seed: int, purpose: str, *coordinates: int) -> np.random.Generator:
    """A generator of its own for one purpose at one place."""
    return np.random.Generator(np.random.Philox(sequence(seed, purpose, *coordinates)))


def integer(seed: int, purpose: str, *coordinates: int) -> int:
    """A derived seed in [0, 2**31), for `env.reset(seed=...)`: some environments keep it in a C int."""
    return int(sequence(seed, purpose, *coordinates).generate_state(1, np.uint32)[0] >> 1)
