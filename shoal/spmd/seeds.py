"""Derive different random numbers for each rank from one seed."""

from __future__ import annotations

import random
import sys
from typing import Any

from shoal.base import seeding
from shoal.spmd.world import world


def own_seed(seed: int) -> int:
    """Derive this rank's seed. Rank 0 gets `seed` itself, so a single process behaves as without Shoal."""
    number = world().rank
    return seeding.integer(seed, "rank", number) if number else seed


def seed_everything(seed: int) -> Any:
    """Seed `random`, and NumPy, PyTorch and TensorFlow if they are loaded, with this rank's seed.

    Returns this rank's random key (a `jax.Array`) if JAX is loaded, else None.
    """
    own = own_seed(seed)
    random.seed(own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(own)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(own)
    return sys.modules["jax"].random.key(own) if "jax" in sys.modules else None
