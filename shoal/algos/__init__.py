"""Algorithms by name, and what each of them is: a frozen `Config` and a generator `train`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import UsageError
from shoal.policies.policy import SavedPolicy

# name -> module; loaded only when asked for, because algorithms load JAX
ALGOS = {
    "dqn": "shoal.algos.dqn",
    "es": "shoal.algos.es",
    "nevergrad": "shoal.algos.nevergrad",
    "ppo": "shoal.algos.ppo",
    "trpo": "shoal.algos.trpo",
}

SEARCHES = ("es", "nevergrad")
"""Those that learn from scores of whole policies, and see no steps."""


@dataclass(frozen=True)
class Step:
    """What an algorithm yields after each iteration."""

    metrics: dict[str, float]
    """Numbers to track, under Stable-Baselines3's names."""
    learned: Tree
    """Weights, optimizer, statistics and counters: its digest is what "the same" means."""
    state: Callable[[], Tree]
    """The whole truth for an exact resume: `learned` and what else it takes, as of this iteration."""
    policy: SavedPolicy
    """The policy as it is now."""


class Config(Protocol):
    """Settings of an algorithm: a frozen dataclass."""

    @property
    def hidden(self) -> tuple[int, ...]:
        """Hidden layers, for the choice of learner threads."""

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""


class Algo(Protocol):
    """What an algorithm's module has."""

    Config: type[Any]

    def train(
        self, config: Any, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
    ) -> Iterator[Step]:
        """Learn for ever, from the start or from a state; schedules end at `steps` environment steps."""


def load(name: str) -> Algo:
    """The module of an algorithm."""
    if name not in ALGOS:
        near = difflib.get_close_matches(name, ALGOS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no algorithm {name!r}. {hint}Algorithms: {', '.join(ALGOS)}")
    module: Algo = importlib.import_module(ALGOS[name])
    return module
