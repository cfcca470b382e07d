"""Engines by name. `make("processes", workers=4)` is what `shoal.engine` calls."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from shoal.engines.base import Engine
from shoal.errors import UsageError

# name -> where its class is; loaded only when asked for, so that optional packages stay optional
ENGINES = {
    "serial": "shoal.engines.serial:SerialEngine",
    "processes": "shoal.engines.processes:ProcessesEngine",
    "mpi": "shoal.engines.mpi:MPIEngine",
    "ray": "shoal.engines.ray.engine:RayEngine",
    "redis": "shoal.engines.redis.engine:RedisEngine",
}
ADDRESSED: tuple[str, ...] = ("ray", "redis")
"""Engines that may be told where their workers are: NAME://ADDRESS."""


def split(engine: str) -> tuple[str, str | None]:
    """Name and address of an engine, from `NAME` or `NAME://ADDRESS`."""
    name, separator, address = engine.partition("://")
    if name in ("rediss", "unix"):  # other ways to a Redis server
        return "redis", engine
    return name, address if separator else None


def check(engine: str, workers: int | None, options: Mapping[str, Any] | None = None) -> list[str]:
    """What is wrong with an engine's name, address, number of workers and options of its own."""
    name, address = split(engine)
    problems = []
    if address is not None and name in ENGINES and name not in ADDRESSED:
        problems.append(f"the {name} engine has no address, so {engine!r} is not an engine. Use --engine {name}")
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        problems.append(f"there is no engine {name!r}. {hint}Engines: {', '.join(ENGINES)}")
    if name == "redis" and address is not None:
        from shoal.engines.redis.address import address_problems

        problems += address_problems(address)
    if workers is not None and workers < 1:
        problems.append(f"workers must be at least 1, not {workers}")
    if name == "serial" and workers not in (None, 1):
        problems.append(f"the serial engine is one process; it cannot have {workers} workers. Use --engine processes")
    if name == "ray":
        problems += importlib.import_module("shoal.engines.ray.engine").problems(address, options or {})
    elif options:
        problems.append(f"the {name} engine has no options of its own, so it cannot have {', '.join(options)}")
    return problems


def make(name: str = "processes", workers: int | None = None, **options: Any) -> Engine:
    """An engine by name: "serial" (this process), "processes" (this machine; one worker per core unless told), "mpi"
    (the ranks of this job) or "ray" (a Ray cluster, or Ray on this machine).

    Use it as a context manager. `options` go to the engine's class, for example `task_timeout=600` for `processes`.
    """
    problems = check(name, workers)
    if problems:
        raise UsageError(problems)
    name, address = split(name)
    if address is not None:
        options["address"] = address
    module, _, attribute = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), attribute)(workers=workers, **options)
    return engine
