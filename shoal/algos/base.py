"""What Shoal needs from an algorithm: settings that derive from `AlgorithmConfig`, and a generator `train`.

This page is the whole contract. The rest of Shoal asks for nothing else, and `shoal.testing.algorithms` checks it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import tyro

from shoal.base.trees import Tree, flatten
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import UsageError
from shoal.policies.policy import SavedPolicy


@dataclass(frozen=True)
class Step:
    """The result of one iteration."""

    metrics: dict[str, float]
    """Numbers to track, under Stable-Baselines3's names where it has one. `time/total_timesteps`, `time/sample_seconds`
    and `time/learn_seconds` are required."""
    learned: Tree
    """Weights, optimizer state, statistics and counters. Their digest defines equal results."""
    state: Callable[[], Tree]
    """Assembles everything that an exact resume from this iteration needs: `learned`, and ledgers or buffers."""
    policy: SavedPolicy
    """The current policy."""


@dataclass(frozen=True)
class AlgorithmConfig(abc.ABC):
    """Settings of an algorithm. Derive a frozen dataclass whose fields, with their docstrings, become flags.

    The properties tell Shoal what it needs to know; a field of the same name replaces a property. `start` is a setting
    of every algorithm: see `first_weights`.
    """

    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Start from the weights and observation statistics of this run's policy, or of a policy file (default: new
    weights)."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that results depend on, besides NumPy, Gymnasium, JAX and Optax; a run records their versions."""

    @property
    @abc.abstractmethod
    def lanes(self) -> int:
        """Number of lanes: at most this many workers are busy."""

    @property
    def samples(self) -> Literal["fragments", "episodes", "scores"]:
        """What workers send: rollouts of a fixed length, whole episodes, or only the scores of whole episodes."""
        return "fragments"

    @property
    def steps_per_iteration(self) -> int | None:
        """Environment steps of one iteration; None where that number varies."""
        return None

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the hidden layers, by which the number of learner threads is chosen."""
        return ()

    @property
    def scheduled(self) -> bool:
        """Whether a schedule ends at the run's last step, so that a new goal changes results."""
        return False

    @property
    def score_episodes(self) -> int:
        """Episodes in each iteration that evaluate the current policy itself, for `eval/mean_reward`; 0 if none do."""
        return 0

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        return []


class Algorithm(Protocol):
    """The module of an algorithm."""

    Config: type[AlgorithmConfig]
    """Its settings."""

    def train(
        self, config: Any, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
    ) -> Iterator[Step]:
        """Learn until the caller stops, from the start or from a state; schedules end at `steps` environment steps."""


REQUIRED_METRICS = ("time/total_timesteps", "time/sample_seconds", "time/learn_seconds")


def checked(steps: Iterator[Step], name: str) -> Iterator[Step]:
    """Pass on the steps of an algorithm; raise where they break the contract, which users' algorithms may."""
    number = 0
    for number, step in enumerate(steps, start=1):  # noqa: B007 - used after the loop
        if not isinstance(step, Step):
            raise UsageError(f"train of {name} yielded {_shortened(step)}; it must yield shoal.algos.base.Step")
        missing = [key for key in REQUIRED_METRICS if key not in step.metrics]
        if missing:
            raise UsageError(f"the metrics of {name} lack {', '.join(missing)}: add them to the metrics of each Step")
        if problems := _step_problems(step):
            raise UsageError([f"the Step of {name} does not fit: {problem}" for problem in problems])
        yield step
    raise UsageError(f"train of {name} ended after {number} iterations; it must go on until the caller stops it")


def _step_problems(step: Step) -> list[str]:
    """Describe fields of a step that have other types than they must; arrays of JAX are the likeliest."""
    numbers = (int, float, np.integer, np.floating)
    found = [
        f"metrics[{key!r}] must be a number, not {_shortened(value)}: use float(...)"
        for key, value in step.metrics.items()
        if not isinstance(value, numbers)
    ]
    try:
        flatten(step.learned)
    except TypeError as error:
        found.append(f"in learned, {error}: use np.asarray(...) for arrays of JAX")
    state: object = step.state
    if not callable(state):
        found.append(f"state must be a function that returns the state, not {_shortened(state)}")
    policy: object = step.policy
    if not isinstance(policy, SavedPolicy):
        found.append(f"policy must be a SavedPolicy, not {_shortened(policy)}")
    return found


def _shortened(value: object) -> str:
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 80 else text[:77] + '...'})"


def algorithm_problems(module: ModuleType) -> list[str]:
    """Describe what a module lacks to be an algorithm."""
    problems = []
    config = getattr(module, "Config", None)
    if config is None:
        problems.append("it has no class Config; define one that derives from shoal.algos.base.AlgorithmConfig")
    elif not (isinstance(config, type) and issubclass(config, AlgorithmConfig)):
        problems.append(f"Config must be a class that derives from shoal.algos.base.AlgorithmConfig, not {config!r}")
    elif "__dataclass_fields__" not in vars(config) or not dataclasses.fields(config):
        problems.append("Config must be a dataclass with at least one field: put @dataclass(frozen=True) above it")
    elif abstract := sorted(getattr(config, "__abstractmethods__", ())):
        problems.append(f"Config does not define {', '.join(abstract)}")
    else:
        problems += [
            f"the setting {field.name!r} of Config needs a default value"
            for field in dataclasses.fields(config)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
    if not callable(getattr(module, "train", None)):
        problems.append("it has no function train(config, env, engine, seed, steps, state=None) that yields a Step")
    return problems
