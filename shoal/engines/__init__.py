"""Engines by name. `make("processes", workers=4)` is what `shoal.engine` calls."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from shoal.engines.base import Engine
from shoal.errors import UsageError

# name -> where its class is; loaded only when asked for, so that optional packages stay optional
ENGINES = {
    "serial": "shoal.engines.serial:SerialEngine",
    "processes": "shoal.engines.processes:ProcessesEngine",
    "mpi": "shoal.engines.mpi:MPIEngine",
}


def check(name: str, workers: int | None) -> list[str]:
    """What is wrong with an engine's name and number of workers."""
    problems = []
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        problems.append(f"there is no engine {name!r}. {hint}Engines: {', '.join(ENGINES)}")
    if workers is not None and workers < 1:
        problems.append(f"workers must be at least 1, not {workers}")
    if name == "serial" and workers not in (None, 1):
        problems.append(f"the serial engine is one process; it cannot have {workers} workers. Use --engine processes")
    return problems


def make(name: str = "processes", workers: int | None = None, **options: Any) -> Engine:
    """An engine by name: "serial" (this process) or "processes" (this machine; one worker per core unless told).

    Use it as a context manager. `options` go to the engine's class, for example `task_timeout=600` for `processes`.
    """
    problems = check(name, workers)
    if problems:
        raise UsageError(problems)
    module, _, attribute = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), attribute)(workers=workers, **options)
    return engine
