"""Where the settings of the next trials come from: a grid, or Optuna.

Optuna is asked for batches of a fixed size and receives the results in the order of the trials. So its suggestions
depend only on the sweep's settings, never on workers or arrival order, and a sweep that is run again repeats the same
questions with the results that are on disk. Nothing of Optuna has to be saved.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.base import seeding
from shoal.commands.sweep.results import TrialResult
from shoal.commands.sweep.space import Range, Space
from shoal.commands.sweep.trials import Sweep, Trial
from shoal.errors import MissingExtra

STARTUP = 10  # trials with random settings before Optuna's model chooses


class TrialSource(Protocol):
    """Proposes trials, batch by batch."""

    def ask(self) -> list[Trial]:
        """Return the next trials; none if there are no more."""

    def tell(self, results: Sequence[TrialResult]) -> None:
        """Receive the results of the trials asked for last, in their order."""


def source_of(sweep: Sweep) -> TrialSource:
    """Make the source of a sweep's trials."""
    return OptunaSearch(sweep) if sweep.searched else Grid(sweep)


class Grid:
    """All combinations of values as one batch; the last setting varies fastest."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._asked = False

    def ask(self) -> list[Trial]:
        if self._asked:
            return []
        self._asked = True
        space = {key: values for key, values in self._sweep.space.items() if not isinstance(values, Range)}
        points = itertools.product(*space.values())
        return [self._sweep.trial(n, dict(zip(space, point, strict=True))) for n, point in enumerate(points)]

    def tell(self, results: Sequence[TrialResult]) -> None:
        """Do nothing: the grid is fixed."""


class OptunaSearch:
    """Optuna's tree-structured Parzen estimator."""

    def __init__(self, sweep: Sweep) -> None:
        optuna = _optuna()
        self._sweep = sweep
        self._distributions = {key: _distribution(values) for key, values in sweep.space.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate is called experimental by some versions
            sampler = optuna.samplers.TPESampler(
                seed=seeding.integer(sweep.base.settings.seed, "ask"),
                n_startup_trials=STARTUP,
                multivariate=True,  # settings such as lr and minibatch depend on each other
                constant_liar=True,  # spreads the suggestions of a batch
            )
        pruner = optuna.pruners.NopPruner()  # trials are pruned by shoal.commands.sweep.pruning
        self._study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        self._asked: list[Any] = []  # Optuna's trials
        self._count = 0

    def ask(self) -> list[Trial]:
        count = min(self._sweep.options.trial_batch, self._sweep.count - self._count)
        self._asked = [self._study.ask(self._distributions) for _ in range(max(0, count))]
        trials = [
            self._sweep.trial(self._count + place, _chosen(self._sweep.space, asked.params))
            for place, asked in enumerate(self._asked)
        ]
        self._count += len(trials)
        return trials

    def tell(self, results: Sequence[TrialResult]) -> None:
        states = _optuna().trial.TrialState
        for asked, result in zip(self._asked, results, strict=True):
            for rung, value in result.returns.items():
                asked.report(value, rung)
            if result.state == "finished":
                self._study.tell(asked, result.score)
            else:
                self._study.tell(asked, state=states.PRUNED if result.state == "pruned" else states.FAIL)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise MissingExtra(
            "a search needs Optuna. Install it with: pip install 'shoal[sweep]'; a grid works without it"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distribution(values: tuple[Any, ...] | Range) -> Any:
    distributions = _optuna().distributions
    if not isinstance(values, Range):
        return distributions.CategoricalDistribution(range(len(values)))  # Optuna's choices cannot be tuples
    if values.step is None:
        return distributions.FloatDistribution(values.low, values.high, log=values.log)
    return distributions.IntDistribution(int(values.low), int(values.high), log=values.log, step=values.step)


def _chosen(space: Space, params: dict[str, Any]) -> dict[str, Any]:
    chosen = {}
    for key, values in space.items():
        chosen[key] = params[key] if isinstance(values, Range) else values[params[key]]
    return chosen
