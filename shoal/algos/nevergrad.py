"""Any optimizer of Nevergrad, by ask and tell: it proposes the weights of policies, and is told their scores.

Each generation asks for a whole population, evaluates it, and tells the scores in the order of asking. The optimizer's
`num_workers`, which changes its behaviour, is the population and never the number of workers. `shoal optimizers` lists
the optimizers by family.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import logging
import math
import random
import time
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, ClassVar, Literal

import numpy as np

from shoal.algos.base import Step
from shoal.algos.search import SearchConfig, own_score, policy_for
from shoal.base import seeding, validation
from shoal.base.blas import one_thread
from shoal.base.memory import available_memory, format_bytes
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import CheckpointFault, MissingExtra, UsageError
from shoal.policies.policy import SavedPolicy, Statistics, Weights
from shoal.policies.start import first_weights, load_start
from shoal.sampling import tasks
from shoal.sampling.population import Members, Population
from shoal.sampling.scores import Scores

log = logging.getLogger("shoal.nevergrad")


@dataclass(frozen=True)
class Config(SearchConfig):
    """Settings of a search with Nevergrad."""

    packages: ClassVar[tuple[str, ...]] = ("nevergrad", "cma", "scipy")

    optimizer: str = "CMA"
    """Name in Nevergrad's registry: CMA, DE, PSO, OnePlusOne, ... (`shoal optimizers` lists all)."""
    sigma: float = 0.5
    """Initial standard deviation of each weight."""
    budget: int | None = None
    """Total number of evaluations that the optimizer may plan for. Some optimizers need it or adapt to it."""
    environments: Literal["all", "independent"] = "all"
    """Which members share environment seeds: all of a generation, or none."""

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        found = super().problems() + validation.field_problems(self, at_least_one=("budget",), above_zero=("sigma",))
        try:
            names = registry()
        except MissingExtra as error:
            return found + error.problems
        if self.optimizer not in names:
            near = [name for name in names if name.lower() == self.optimizer.lower()]
            near = near or difflib.get_close_matches(self.optimizer, names, n=3)
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            found.append(f"Nevergrad has no optimizer {self.optimizer!r}. {hint}To list them, run: shoal optimizers")
        elif self.population > 1 and (
            names[self.optimizer].no_parallelization or family(self.optimizer).name == "classic"
        ):
            found.append(f"{self.optimizer} takes one evaluation at a time: use --population 1, or another optimizer")
        return found


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    """Search until the caller stops, from the start or from a state. Optimizers plan for `budget`, not for `steps`."""
    spaces = engine.submit(tasks.describe, env.to_record()).result()
    saved = load_start(config.start)
    # Changing statistics would change the score of equal weights, so those of a saved policy are kept as they are.
    policy = policy_for(config, spaces, normalise=saved is not None and saved.policy.normalise)
    first = first_weights(policy, saved, seed)
    population = Population(engine, env, policy, seed, config.lanes, config.width)
    if warning := too_large(config.optimizer, policy.count):
        needed, available = _FULL_MATRICES * 8 * policy.count**2, available_memory()
        if full(config.optimizer) and available is not None and needed > available:
            raise UsageError(
                f"{warning}. It would need {format_bytes(needed)} of memory; {format_bytes(available)} are available"
            )
        log.warning("%s", warning)

    state = state or {}
    searcher = Searcher(config, seed, first["params"])
    told = state.get("told", np.zeros((0, config.population)))
    for losses in told:
        searcher.ask()
        searcher.tell(losses)
    if searcher.asked != state.get("asked", searcher.asked):
        raise CheckpointFault(
            f"{config.optimizer} proposed different weights when its history was replayed, so this search cannot be "
            f"resumed here. Either this machine computes other bits than the one that started the run (a warning "
            f"above then names the canary): resume it on that kind of machine. Or the optimizer does not depend on its "
            f"seed alone: choose another optimizer for a new run"
        )
    scores = Scores(state.get("scores"))
    iteration, mean_length = len(told), state.get("mean_length", 0.0)
    own, count = config.score_episodes, config.population
    who = np.zeros(count, np.int64) if config.environments == "all" else np.arange(count)
    env_seeds = np.concatenate([-1 - np.arange(own), who])
    statistics: Statistics = {"mean": first["mean"], "scale": first["scale"]}
    weights = engine.share(statistics)

    while True:
        iteration += 1
        begun = time.perf_counter()
        asked = searcher.ask()
        params = np.concatenate([np.tile(searcher.best, (own, 1)), asked]).astype(np.float32)
        ready = time.perf_counter()
        outcome = population.evaluate(weights, config.plan(iteration, mean_length), Members(env_seeds, params))
        sampled = time.perf_counter()

        fitness = outcome.fitness(own + count)[own:]
        searcher.tell(-fitness)
        told = np.concatenate([told, -fitness[None]])
        evaluated = outcome.scores(slice(own, own + count))
        scores.add([evaluated])
        scores.steps += int(outcome.scores(slice(0, own))["lengths"].sum())
        mean_length = float(evaluated["lengths"].mean())

        best = searcher.best.astype(np.float32)
        learned = {
            "policy": {"params": best},
            "told": told,
            "asked": searcher.asked,
            "scores": scores.state(),
            "iteration": iteration,
            "mean_length": mean_length,
        }
        measures = {
            "rollout/fitness_mean": float(fitness.mean()),
            "rollout/fitness_max": float(fitness.max()),
            "train/evaluations": iteration * count,
        }
        learning = ready - begun + time.perf_counter() - sampled
        timing = {"time/sample_seconds": sampled - ready, "time/learn_seconds": learning}
        current: Weights = {"params": best, "mean": first["mean"], "scale": first["scale"]}
        yield Step(
            metrics=scores.metrics() | {"time/iterations": iteration} | own_score(outcome, own) | measures | timing,
            learned=learned,
            state=lambda learned=learned: learned,  # type: ignore[misc]
            policy=SavedPolicy(policy, current, env.to_record()),
        )


class Searcher:
    """One of Nevergrad's optimizers, made to depend on nothing but the seed and the scores it was told."""

    def __init__(self, config: Config, seed: int, start: np.ndarray) -> None:
        self.name, self.count, self.seed = config.optimizer, config.population, seed
        self.budget = config.budget
        self.generation = 0
        self.asked = hashlib.sha256().hexdigest()
        """Digest of all weights proposed so far."""
        self._candidates: list[Any] = []
        self._losses: dict[int, float] = {}  # of all proposed weights, by `_key`
        with self._fixed():
            import nevergrad

            made = registry()[self.name]
            space = nevergrad.p.Array(init=start.astype(np.float64)).set_mutation(sigma=config.sigma)
            space.random_state = np.random.RandomState(seeding.integer(seed, "ask", 0))
            try:
                self._optimizer = made(space, budget=config.budget, num_workers=self.count)
                self.best: np.ndarray = start.astype(np.float64)
                """Recommended weights; those of the start before the first scores."""
            except Exception as error:  # any of hundreds of optimizers may raise anything
                raise self._refused(error) from error

    def ask(self) -> np.ndarray:
        """Propose the weights of a whole population (population, count) float64."""
        self.generation += 1
        with self._fixed():
            try:
                self._candidates = [self._optimizer.ask() for _ in range(self.count)]
            except Exception as error:
                raise self._refused(error) from error
        found = np.array([candidate.value for candidate in self._candidates])
        self.asked = hashlib.sha256(self.asked.encode() + found.tobytes()).hexdigest()
        return found

    def tell(self, losses: np.ndarray) -> None:
        """Report the losses of the weights proposed last, in the order of asking."""
        with self._fixed():
            try:
                for candidate, loss in zip(self._candidates, losses.tolist(), strict=True):
                    self._optimizer.tell(candidate, loss)
                recommended = np.array(self._optimizer.provide_recommendation().value)
            except Exception as error:
                raise self._refused(error) from error
        for candidate, loss in zip(self._candidates, losses.tolist(), strict=True):
            self._losses[_key(candidate.value)] = loss
        # CMA restarts once it has converged and then recommends the best since the restart, which may be worse.
        if not self._loss(recommended) > self._loss(self.best):
            self.best = recommended

    def _loss(self, params: np.ndarray) -> float:
        """Look up the loss of weights; NaN for weights that were never evaluated, such as a mean."""
        return self._losses.get(_key(params), math.nan)

    def _fixed(self) -> contextlib.AbstractContextManager[None]:
        return _seeded(seeding.integer(self.seed, "ask", 1, self.generation))

    def _refused(self, error: Exception) -> UsageError:
        hints = []
        if isinstance(error, ImportError):
            hints.append(
                "It needs a package that Nevergrad does not install: install that package, or try another optimizer"
            )
        elif self.budget is None:
            hints.append("It may need to know the total number of evaluations: --budget N")
        if "paralleliz" in str(error).lower():
            hints.append("It takes one evaluation at a time: --population 1")
        return UsageError(
            f"Nevergrad's {self.name} raised {type(error).__name__} in generation {self.generation}: {error}. "
            f"{'. '.join(hints) or 'Try another optimizer: shoal optimizers'}"
        )


def _key(params: np.ndarray) -> int:
    """Identify weights by their float32 bits: Nevergrad's own conversions change the last bits of float64."""
    return hash(params.astype(np.float32).tobytes())


@contextlib.contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Seed the global generators of NumPy and Python for a block: many optimizers draw from them.

    Also use one BLAS thread, since more change bits, and silence Nevergrad's many warnings.
    """
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(number)
    random.seed(number)
    try:
        with one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@functools.cache
def registry() -> dict[str, Any]:
    """Import Nevergrad and return its optimizers by name."""
    try:
        with _seeded(0):  # Nevergrad draws settings of some optimizers at import
            import nevergrad
    except ImportError:
        raise MissingExtra(
            "the algorithm nevergrad needs a package that is not installed: pip install 'shoal[nevergrad]'"
        ) from None
    return {name: made for name, made in nevergrad.optimizers.registry.items() if name.strip()}


@dataclass(frozen=True)
class Family:
    """Optimizers of one kind."""

    name: str
    description: str
    kinds: tuple[str, ...] = ()
    """Nevergrad's classes."""
    limit: int | None = None
    """Number of weights up to which they make progress; None: any."""


@functools.cache
def families() -> tuple[Family, ...]:
    """Read the families: diagonal CMA first, then CMA; the last one takes all other optimizers."""
    text = (resources.files(__package__) / "nevergrad_families.toml").read_text()
    return tuple(
        Family(**family | {"kinds": tuple(family.get("kinds", ()))}) for family in tomllib.loads(text)["family"]
    )


def family(name: str) -> Family:
    """Find the family of an optimizer."""
    made = registry()[name]
    kinds = {kind.__name__ for kind in (made.__mro__ if isinstance(made, type) else type(made).__mro__)}
    if "ParametrizedCMA" in kinds and made.config().get("diagonal"):
        return families()[0]
    return next((known for known in families() if kinds & set(known.kinds)), families()[-1])


_FULL_MATRICES = 4
"""Numbers that full CMA keeps for each pair of weights, approximately."""


def full(name: str) -> bool:
    """Test whether an optimizer, or one that it is built from, learns the full covariance of the weights."""
    return family(name) is not families()[0] and "CMA" in name and "Diag" not in name


def too_large(name: str, count: int) -> str:
    """Word a warning if an optimizer does not suit this number of weights; empty if it does."""
    limit = families()[1].limit if full(name) else family(name).limit
    if limit is None or count <= limit:
        return ""
    return (
        f"the policy has {count:,} weights, and {name} ({family(name).name}) makes little progress with more than "
        f"{limit:,}. For large networks use --optimizer DiagonalCMA or OnePlusOne, or the algorithm es"
    )
