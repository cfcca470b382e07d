"""`shoal.sweep`: the command `shoal sweep` from Python."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from rich.console import Console

from shoal.api.training import python_signals, split_engine
from shoal.base import signals
from shoal.commands.campaign.heads import refuse_mpi_outside_a_job
from shoal.commands.sweep.console import printer_of
from shoal.commands.sweep.plan import plan_sweep
from shoal.commands.sweep.results import SweepResult
from shoal.commands.sweep.session import SweepSession
from shoal.commands.sweep.space import setting_name
from shoal.commands.sweep.trials import SweepOptions
from shoal.engines.base import Engine
from shoal.runs.keywords import EnvSource, make_spec
from shoal.runs.run import make_engine


def sweep(
    algo: str | ModuleType,
    env: EnvSource | None = None,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    search: Mapping[str, str | Sequence[Any]] | None = None,
    trials: int | None = None,
    seeds: int = 1,
    prune_every: int | None = None,
    trial_batch: int = 8,
    final_episodes: int = 100,
    at_once: int | None = None,
    engine: str | Engine | None = None,
    preset: bool | str = True,
    progress: bool = False,
    **settings: Any,
) -> SweepResult:
    """Try settings of an algorithm, each with several seeds, and return the results; the best trial is `.best`.

    `grid` has the values to try in all combinations: `{"lr": [1e-3, 3e-4], "hidden": [(64, 64), (32,)]}`. With
    `search`, Optuna chooses `trials` combinations from lists of values or ranges: `{"lr": "log:1e-5:1e-2", "epochs":
    "int:3:20", "activation": ["tanh", "relu"]}`. All other settings are those of `shoal.train`. The runs are ordinary
    ones in `runs/NAME`, and the same call again continues them.
    """
    name, made = split_engine(engine)
    base = make_spec(algo, env, settings | ({} if name is None else {"engine": name}), preset)
    options = SweepOptions(
        trials=trials, seeds=seeds, prune_every=prune_every, trial_batch=trial_batch, final_episodes=final_episodes,
        at_once=at_once,
    )  # fmt: skip
    planned = plan_sweep(base, options, grid or {}, search or {}, {setting_name(key) for key in settings})
    if made is None:
        refuse_mpi_outside_a_job("sweep", base.settings.engine, base.settings.workers)
    with python_signals(), signals.listening(), contextlib.ExitStack() as stack:
        used = made or stack.enter_context(make_engine(base.settings))
        printer = stack.enter_context(printer_of(Console(quiet=not progress), planned))
        session = SweepSession(planned, used, printer)
        result = session.run()
        session.report(result).write()
        return result
