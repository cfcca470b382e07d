"""The trials of a sweep, and the ordinary runs that they consist of, with names that the same command finds again."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal import algos
from shoal.base import validation
from shoal.commands.campaign.runs import PlannedRun
from shoal.commands.sweep.space import Range, Space, flag_of, setting_name, text_of
from shoal.errors import UsageError
from shoal.runs.spec import RunSpec, located

TRIALS = 32  # of a search, by default


@dataclass(frozen=True)
class SweepOptions:
    """What a sweep does, besides the settings of its runs."""

    grid: tuple[str, ...] = ()
    """Settings with the values to try in all combinations, as lr=1e-3,3e-4 hidden=[64,64],[32] (default: none)."""
    search: tuple[str, ...] = ()
    """Settings that Optuna chooses, instead of a grid: lr=log:1e-5:1e-2 clip=float:0.1:0.3 epochs=int:3:20
    activation=tanh,relu (default: none)."""
    trials: int | None = None
    """Number of trials of a search (default: 32)."""
    seeds: int = 1
    """Number of runs of each trial, with seeds from --seed on; their mean counts."""
    prune_every: int | None = None
    """Pause all runs each time they have taken this many steps, and end the trials whose return is below the median
    (default: no pruning)."""
    trial_batch: int = 8
    """Trials that a search suggests together, and judges together. Changes the result, unlike the number of workers."""
    final_episodes: int = 100
    """Greedy episodes with each final policy; their mean return is the run's score."""
    at_once: int | None = None
    """Number of runs that train at the same time, each in its own process (default: workers + 1)."""

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        return validation.field_problems(
            self, at_least_one=("trials", "seeds", "prune_every", "trial_batch", "final_episodes")
        )


@dataclass(frozen=True)
class Trial:
    """One combination of settings, and its runs: one for each seed."""

    number: int
    values: dict[str, Any]
    """The swept settings, by field."""
    runs: tuple[PlannedRun, ...]
    problems: tuple[str, ...] = ()
    """Why these settings cannot be trained; empty if they can."""

    @property
    def settings(self) -> dict[str, Any]:
        """The swept settings, as users spell them."""
        return {flag_of(key): value for key, value in self.values.items()}

    @property
    def label(self) -> str:
        """Short description, for tables and plots."""
        return self.runs[0].label


@dataclass(frozen=True)
class Sweep:
    """A checked sweep."""

    base: RunSpec
    """The run that trials vary. Its name and folder are those of the sweep."""
    space: Space
    options: SweepOptions
    searched: bool
    """Whether Optuna chooses the settings; otherwise all combinations are tried."""

    @property
    def folder(self) -> Path:
        """Folder of the runs and the results."""
        settings = self.base.settings
        stem = f"sweep-{algos.short_name(self.base.algo)}-{settings.env.rpartition(':')[2]}"
        return Path(settings.runs) / (settings.name or re.sub(r"[^A-Za-z0-9._-]+", "-", stem))

    @property
    def count(self) -> int:
        """Number of trials."""
        if self.searched:
            return self.options.trials or TRIALS
        return math.prod(len(values) for values in self.space.values() if not isinstance(values, Range))

    def trial(self, number: int, values: dict[str, Any]) -> Trial:
        """Make a trial: its runs, and what is wrong with its settings."""
        config_fields = {field.name for field in fields(self.base.config)}
        settings = replace(self.base.settings, **{key: v for key, v in values.items() if key not in config_fields})
        config = replace(self.base.config, **{key: v for key, v in values.items() if key in config_fields})
        problems: list[str] = []
        try:
            config = located(config, Path(self.base.settings.runs))
        except UsageError as error:
            problems += error.problems
        text = ", ".join(f"{flag_of(key)}={text_of(value)}" for key, value in values.items())
        label, stem = f"{number}: {text}", f"trial-{number:03}" if self.searched else _name(values)
        runs = []
        for seed in range(settings.seed, settings.seed + max(1, self.options.seeds)):
            own = replace(settings, runs=str(self.folder), name=f"{stem}-seed{seed}", seed=seed)
            runs.append(PlannedRun(label, RunSpec(self.base.algo, own, config)))
        problems += [problem for run in (runs[0], runs[-1]) for problem in run.spec.problems()]
        return Trial(number, values, tuple(runs), tuple(dict.fromkeys(problems)))

    def trial_with(self, number: int, settings: Mapping[str, Any]) -> Trial:
        """Make the trial that has these settings, as users spell them."""
        return self.trial(number, {setting_name(key): value for key, value in settings.items()})

    def identity(self) -> dict[str, Any]:
        """Describe what the results of a search depend on, besides the settings that its runs record."""
        space = {
            flag_of(key): asdict(values) if isinstance(values, Range) else list(values)
            for key, values in self.space.items()
        }
        if not self.searched:
            return {"grid": space}
        import optuna

        options = self.options
        plain = {
            "seeds": options.seeds,
            "prune_every": options.prune_every,
            "trial_batch": options.trial_batch,
            "final_episodes": options.final_episodes,
        }
        made: dict[str, Any] = json.loads(json.dumps({"search": space, **plain, "optuna": optuna.__version__}))
        return made


def _name(values: Mapping[str, Any]) -> str:
    """Name the trial of a grid by its values, so that a larger grid finds its runs again."""
    exact = "-".join(f"{flag_of(key)}-{_exact(value)}" for key, value in values.items())
    clean = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", exact).strip(".-")
    if clean == exact and len(clean) <= 40:
        return clean
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
    return f"{clean[:33].strip('.-')}-{digest}"


def _exact(value: Any) -> str:
    return "x".join(map(_exact, value)) if isinstance(value, tuple) else str(value)
