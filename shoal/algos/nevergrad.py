"""Any optimizer of Nevergrad, by ask and tell: it proposes the weights of policies, and is told how they scored.

Each generation asks for a whole population, evaluates it, and tells the scores in the order of asking. The optimizer's
`num_workers`, which changes what it does, is the population and never the number of workers. To see which optimizers
there are, type: shoal optimizers
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
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal.algos import Step
from shoal.algos.search import SearchConfig, first_weights, policy_for, saved_start, score
from shoal.base import seeding, validation
from shoal.base.blas import one_thread
from shoal.base.memory import available_memory, format_bytes
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec, describe
from shoal.errors import CheckpointFault, MissingExtra, UsageError
from shoal.policies.policy import SavedPolicy
from shoal.sampling.population import Members, Population
from shoal.sampling.scores import Scores

log = logging.getLogger("shoal.nevergrad")

PACKAGES = ("nevergrad", "cma", "scipy")
"""What its results depend on beside what all algorithms do."""


@dataclass(frozen=True)
class Config(SearchConfig):
    """Settings of a search with Nevergrad."""

    optimizer: str = "CMA"
    """Name in Nevergrad's registry: CMA, DE, PSO, OnePlusOne, ... All of them: shoal optimizers."""
    sigma: float = 0.5
    """Standard deviation of each weight around where the search starts."""
    budget: int | None = None
    """Evaluations in all that the optimizer may plan for. Some need it, and some choose what they do by it."""
    environments: Literal["all", "independent"] = "all"
    """Whether all policies of a generation are evaluated in equal environments."""

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        found = super().problems() + validation.field_problems(self, at_least_one=("budget",), above_zero=("sigma",))
        try:
            names = registry()
        except MissingExtra as error:
            return found + error.problems
        if self.optimizer not in names:
            near = [name for name in names if name.lower() == self.optimizer.lower()]
            near = near or difflib.get_close_matches(self.optimizer, names, n=3)
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            found.append(
                f"Nevergrad has no optimizer {self.optimizer!r}. {hint}To see them all, type: shoal optimizers"
            )
        elif self.population > 1 and (names[self.optimizer].no_parallelization or family(self.optimizer) is CLASSIC):
            found.append(f"{self.optimizer} takes one evaluation at a time: use --population 1, or another optimizer")
        return found


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    """Search for ever, from the start or from a state. What the optimizer may plan for is `budget`, not `steps`."""
    spaces = engine.submit(describe, env.to_tree()).result()
    saved = saved_start(config)
    # Statistics that went on changing would change what a policy scores; those of a saved policy are kept as they are.
    policy = policy_for(config, spaces, normalise=saved is not None and saved.policy.normalise)
    first = first_weights(saved, policy, seed)
    population = Population(engine, env, policy, seed, config.lanes, config.width)
    if word := too_large(config.optimizer, policy.count):
        needed, there = _FULL_MATRICES * 8 * policy.count**2, available_memory()
        if full(config.optimizer) and there is not None and needed > there:
            raise UsageError(
                f"{word}. It would need {format_bytes(needed)} of memory, and {format_bytes(there)} are available"
            )
        log.warning("%s", word)

    state = state or {}
    searcher = Searcher(config, seed, first["params"])
    told = state.get("told", np.zeros((0, config.population)))
    for losses in told:
        searcher.ask()
        searcher.tell(losses)
    if searcher.asked != state.get("asked", searcher.asked):
        raise CheckpointFault(
            f"{config.optimizer} did not ask the same again when it was told what it had been told before, so this "
            f"search cannot go on. It does not follow from its seed alone: choose another optimizer for a new run"
        )
    scores = Scores(state.get("scores"))
    iteration, mean_length = len(told), state.get("mean_length", 0.0)
    own, count = config.score_episodes, config.population
    who = np.zeros(count, np.int64) if config.environments == "all" else np.arange(count)
    env_seeds = np.concatenate([-1 - np.arange(own), who])
    statistics = {"mean": first["mean"], "scale": first["scale"]}
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
        record = outcome.record(slice(own, own + count))
        scores.add([record])
        scores.steps += int(outcome.record(slice(0, own))["lengths"].sum())
        mean_length = float(record["lengths"].mean())

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
        yield Step(
            metrics=scores.metrics() | {"time/iterations": iteration} | score(outcome, own) | measures | timing,
            learned=learned,
            state=lambda learned=learned: learned,  # type: ignore[misc]
            policy=SavedPolicy(policy, {"params": best} | statistics, env.to_tree()),
        )


class Searcher:
    """One of Nevergrad's optimizers, whose every ask follows from the seed and from what it was told."""

    def __init__(self, config: Config, seed: int, start: np.ndarray) -> None:
        self.name, self.count, self.seed = config.optimizer, config.population, seed
        self.budget = config.budget
        self.generation = 0
        self.asked = hashlib.sha256().hexdigest()
        """Digest of all that it asked so far."""
        self._candidates: list[Any] = []
        self._losses: dict[int, float] = {}  # of all that it asked, by `_key`
        with self._fixed():
            import nevergrad

            made = registry()[self.name]
            space = nevergrad.p.Array(init=start.astype(np.float64)).set_mutation(sigma=config.sigma)
            space.random_state = np.random.RandomState(seeding.integer(seed, "ask", 0))
            try:
                self._optimizer = made(space, budget=config.budget, num_workers=self.count)
                self.best: np.ndarray = start.astype(np.float64)
                """What it recommends: where it starts, before it was told anything."""
            except Exception as error:  # whatever any of hundreds of optimizers raises
                raise self._refused(error) from error

    def ask(self) -> np.ndarray:
        """Weights of a whole population (population, count) float64."""
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
        """Scores of what was asked last, less being better, in the order of asking."""
        with self._fixed():
            try:
                for candidate, loss in zip(self._candidates, losses.tolist(), strict=True):
                    self._optimizer.tell(candidate, loss)
                recommended = np.array(self._optimizer.provide_recommendation().value)
            except Exception as error:
                raise self._refused(error) from error
        for candidate, loss in zip(self._candidates, losses.tolist(), strict=True):
            self._losses[_key(candidate.value)] = loss
        # CMA begins anew once it has converged, and then recommends the best since. What it found before was better.
        if not self._loss(recommended) > self._loss(self.best):
            self.best = recommended

    def _loss(self, params: np.ndarray) -> float:
        """What it was told about weights; not a number if nothing, as of a mean of what was tried."""
        return self._losses.get(_key(params), math.nan)

    def _fixed(self) -> contextlib.AbstractContextManager[None]:
        return _fixed_chance(seeding.integer(self.seed, "ask", 1, self.generation))

    def _refused(self, error: Exception) -> UsageError:
        hints = []
        if isinstance(error, ImportError):
            hints.append("It needs a package that Nevergrad does not install: install that, or try another optimizer")
        elif self.budget is None:
            hints.append("It may need to know how many evaluations there will be: --budget N")
        if "paralleliz" in str(error).lower():
            hints.append("It takes one evaluation at a time: --population 1")
        return UsageError(
            f"Nevergrad's {self.name} raised {type(error).__name__} in generation {self.generation}: {error}. "
            f"{'. '.join(hints) or 'Try another optimizer: shoal optimizers'}"
        )


def _key(params: np.ndarray) -> int:
    """Tells weights from others, as policies have them: Nevergrad's own way there and back changes the last bits."""
    return hash(params.astype(np.float32).tobytes())


@contextlib.contextmanager
def _fixed_chance(number: int) -> Iterator[None]:
    """Many optimizers also draw from the process's own generators. Here these begin with a number that is given.

    And one BLAS thread, since more change bits; and no advice, of which Nevergrad gives a lot.
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
    """Nevergrad's optimizers by name."""
    try:
        with _fixed_chance(0):  # some settings of optimizers are drawn when it is loaded
            import nevergrad
    except ImportError:
        raise MissingExtra(
            "this needs a package that is not installed. To install it, type: pip install 'shoal[nevergrad]'"
        ) from None
    return {name: made for name, made in nevergrad.optimizers.registry.items() if name.strip()}


@dataclass(frozen=True)
class Family:
    """Optimizers of one kind."""

    name: str
    words: str
    """What they do."""
    limit: int | None
    """Number of weights up to which they are any good; None: any."""
    kinds: tuple[str, ...]
    """Nevergrad's classes."""


CLASSIC = Family(
    "classic", "local searches of numerical libraries; one evaluation at a time (--population 1)", 200,
    ("NonObjectOptimizer", "SPSA"),
)  # fmt: skip

FAMILIES = (
    Family("diagonal CMA", "as CMA, but learns a scale for each weight only; for large networks", None, ()),
    Family("CMA", "learns how weights go together: the best start for small networks. Memory and time grow with the "
           "square of the weights", 2000, ("ParametrizedCMA", "CMA", "MetaCMA")),
    Family("differential evolution", "combines differences of good policies", 10_000,
           ("DifferentialEvolution",)),
    Family("particle swarms", "policies fly towards the best ones known", 10_000, ("ConfPSO",)),
    Family("one plus one", "changes the best policy and keeps what is better; for noisy scores, those called Noisy",
           None, ("ParametrizedOnePlusOne",)),
    Family("populations", "mutate, recombine, keep the better half", None,
           ("EvolutionStrategy", "ParametrizedTBPSA", "cGA")),
    Family("distributions", "fit a normal distribution to the best policies", 1000, ("EMNA", "EDA")),
    Family("choosers", "choose an optimizer by dimension, budget and population; give --budget", None,
           ("NGOptBase", "ConfPortfolio", "Portfolio", "MultipleSingleRuns", "ChoiceBase")),
    Family("chains", "one optimizer after another; give --budget", 2000, ("Chaining", "Rescaled")),
    Family("surrogates", "fit a model of the score and look where it is best", 200,
           ("ParametrizedMetaModel", "ParametrizedBO", "BayesOptim", "AXP")),
    CLASSIC,
    Family("samplers", "try random or evenly spread policies and learn nothing on the way; give --budget", 100,
           ("SamplingSearch", "RandomSearchMaker", "StupidRandom")),
    Family("others", "several criteria, bandits, one optimizer for each group of weights", None, ()),
)  # fmt: skip


def family(name: str) -> Family:
    """The family of an optimizer."""
    made = registry()[name]
    kinds = {kind.__name__ for kind in (made.__mro__ if isinstance(made, type) else type(made).__mro__)}
    if "ParametrizedCMA" in kinds and made.config().get("diagonal"):
        return FAMILIES[0]
    return next((known for known in FAMILIES if kinds & set(known.kinds)), FAMILIES[-1])


_FULL_MATRICES = 4
"""Numbers that full CMA keeps for each pair of weights, about."""


def full(name: str) -> bool:
    """Whether an optimizer learns how all weights go together, itself or by one that it is made of."""
    return family(name).name != FAMILIES[0].name and "CMA" in name and "Diag" not in name


def too_large(name: str, count: int) -> str:
    """A warning, if an optimizer is no good for so many weights."""
    limit = FAMILIES[1].limit if full(name) else family(name).limit
    if limit is None or count <= limit:
        return ""
    return (
        f"the policy has {count:,} weights, and {name} ({family(name).name}) hardly gets anywhere with more than "
        f"{limit:,}. For large networks use --optimizer DiagonalCMA or OnePlusOne, or the algorithm es"
    )
