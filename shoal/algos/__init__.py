"""Algorithms by name. `base` has the contract; every other module but `search` is one algorithm."""

from __future__ import annotations

import difflib
import importlib

from shoal.algos.base import Algorithm
from shoal.errors import UsageError

ALGORITHMS = {
    "dqn": "shoal.algos.dqn",
    "es": "shoal.algos.es",
    "nevergrad": "shoal.algos.nevergrad",
    "ppo": "shoal.algos.ppo",
    "trpo": "shoal.algos.trpo",
}
"""Name of each algorithm and its module, which is imported on demand because most of them load JAX."""


def load(name: str) -> Algorithm:
    """Import the module of an algorithm."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no algorithm {name!r}. {hint}Algorithms: {', '.join(ALGORITHMS)}")
    module: Algorithm = importlib.import_module(ALGORITHMS[name])
    return module
