"""Plan a sweep: check everything that can be checked before anything starts, and report all mistakes at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shoal.commands.campaign.runs import at_once_problems, other_settings
from shoal.commands.sweep.ask import source_of
from shoal.commands.sweep.results import read_records
from shoal.commands.sweep.space import parse_space
from shoal.commands.sweep.trials import Sweep, SweepOptions
from shoal.engines import user_code
from shoal.errors import UsageError
from shoal.runs.folder import name_problems
from shoal.runs.spec import RunSpec


def plan_sweep(
    base: RunSpec,
    options: SweepOptions,
    grid: Mapping[str, Any],
    search: Mapping[str, Any],
    fixed: Collection[str],
    problems: Sequence[str] = (),
) -> Sweep:
    """Check a sweep of a run's settings; refuses all mistakes at once, with those that the caller has found.

    `fixed` has the settings of `base` that the user gave.
    """
    found = [*problems, *options.problems(), *at_once_problems(options.at_once, base.settings.engine)]
    if grid and search:
        found.append("a sweep is either a grid or a search: put all settings after one of them")
    elif not (grid or search or problems):
        found.append("there is nothing to sweep: give settings with --grid or --search, as in --grid lr=1e-3,3e-4")
    if options.trials is not None and not search:
        found.append("trials is for a search: a grid has as many trials as combinations of values")
    if user_code.MAIN in base.settings.users_modules:
        found.append(
            f"{base.settings.env} is defined in a notebook cell or an interactive session, and each run of a sweep is "
            f"a process that would not find it. Write its cell to a file and import it from there"
        )
    found += [] if base.settings.name is None else name_problems(base.settings.name)
    space = parse_space(base.algo, search or grid, fixed, bool(search), found)
    sweep = Sweep(base, space, options, bool(search))
    found += _pruning_problems(sweep)
    found += _trial_problems(sweep)
    if found:
        raise UsageError(list(dict.fromkeys(found)))
    read_records(sweep)  # refuses a folder with another search
    return sweep


def _pruning_problems(sweep: Sweep) -> list[str]:
    every, settings = sweep.options.prune_every, sweep.base.settings
    if every is None or settings.iterations is not None or {"steps", "iterations"} & set(sweep.space):
        return []
    if every < settings.steps:
        return []
    return [f"prune_every ({every}) must be less than steps ({settings.steps}): no run would ever pause to be judged"]


def _trial_problems(sweep: Sweep) -> list[str]:
    """Describe what is wrong with the trials of a grid, or with all of a search's first ones, and with their runs."""
    trials = source_of(sweep).ask() or [sweep.trial(0, {})]
    shared = [text for text in trials[0].problems if all(text in trial.problems for trial in trials)]
    if sweep.searched:
        # Optuna's suggestions may be invalid now and then, and it learns from that; but not all of them.
        shared = shared or list(trials[0].problems)
        found = shared if all(trial.problems for trial in trials) else []
    else:
        own = [f"{trial.label}: {text}" for trial in trials for text in trial.problems if text not in shared]
        found = [*shared, *own]
    return found or other_settings([run for trial in trials for run in trial.runs if not trial.problems])
