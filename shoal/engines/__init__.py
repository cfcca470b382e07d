"""Engines by name. `shoal.engine` is this module's `make`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from shoal.engines.base import Engine
from shoal.errors import UsageError

# name -> module:class, imported on first use so that optional packages stay optional
ENGINES = {
    "serial": "shoal.engines.serial:SerialEngine",
    "processes": "shoal.engines.processes:ProcessesEngine",
    "mpi": "shoal.engines.mpi:MPIEngine",
    "ray": "shoal.engines.ray.engine:RayEngine",
    "redis": "shoal.engines.redis.engine:RedisEngine",
}
ADDRESSED: tuple[str, ...] = ("ray", "redis")
"""Engines that take an address: NAME://ADDRESS."""


def split_address(engine: str) -> tuple[str, str | None]:
    """Split `NAME` or `NAME://ADDRESS` into an engine's name and address."""
    name, separator, address = engine.partition("://")
    if name in ("rediss", "unix"):  # other schemes of Redis addresses
        return "redis", engine
    return name, address if separator else None


def engine_problems(engine: str, workers: int | None, options: Mapping[str, object] | None = None) -> list[str]:
    """List what is wrong with an engine's name, address, number of workers and options."""
    name, address = split_address(engine)
    problems = []
    if address is not None and name in ENGINES and name not in ADDRESSED:
        problems.append(f"the {name} engine takes no address, so {engine!r} is not an engine. Use --engine {name}")
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
        problems.append(f"the {name} engine has no options, so it does not take {', '.join(options)}")
    return problems


def make(name: str = "processes", workers: int | None = None, **options: Any) -> Engine:
    """Make an engine by name, to be used as a context manager.

    "serial" runs tasks in this process, "processes" on this machine (default: one worker per core), "mpi" on the other
    ranks of this job, "ray" or "ray://ADDRESS" on a Ray cluster or in Ray on this machine, and "redis" or
    "redis://ADDRESS" on the workers of a Redis server. `options` go to the engine's class, for example
    `task_timeout=600`.
    """
    problems = engine_problems(name, workers)
    if problems:
        raise UsageError(problems)
    name, address = split_address(name)
    if address is not None:
        options["address"] = address
    module, _, attribute = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), attribute)(workers=workers, **options)
    return engine
