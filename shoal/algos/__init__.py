"""Algorithms by name. `base` has the contract; every other module but `search` is one algorithm.

An algorithm of your own needs no registration: name its module (`my_package.a2c`) or its file (`./a2c.py`). An
installed package can give it a short name with an entry point in the group `shoal.algorithms`.
"""

from __future__ import annotations

import difflib
import importlib
from importlib import metadata
from types import ModuleType
from typing import cast

from shoal.algos.base import Algorithm, algorithm_problems
from shoal.engines import user_code
from shoal.errors import UsageError

ALGORITHMS = {
    "dqn": "shoal.algos.dqn",
    "es": "shoal.algos.es",
    "nevergrad": "shoal.algos.nevergrad",
    "ppo": "shoal.algos.ppo",
    "trpo": "shoal.algos.trpo",
}
"""Name of each built-in algorithm and its module, which is imported on demand because most of them load JAX."""

ENTRY_POINTS = "shoal.algorithms"


def installed() -> dict[str, str]:
    """List algorithms of other installed packages: name -> module."""
    found = {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINTS)}
    return {name: module for name, module in sorted(found.items()) if name not in ALGORITHMS}


def full_name(name: str) -> str:
    """Return the name to record for an algorithm, under which it is found from any folder."""
    return str(user_code.absolute(name)) if user_code.is_file(name) else name


def short_name(name: str) -> str:
    """Return the name of an algorithm in folders, presets and seeds: the last part of its module's name."""
    return user_code.absolute(name).stem if user_code.is_file(name) else name.rpartition(".")[2]


def is_builtin(name: str) -> bool:
    """Test whether an algorithm is one of Shoal's."""
    return name in ALGORITHMS


def load(name: str) -> Algorithm:
    """Import the module of an algorithm and check that it is one."""
    return cast(Algorithm, module_of(name))


def module_of(name: str) -> ModuleType:
    """Import the module of an algorithm and check that it is one."""
    if name in ALGORITHMS:
        return importlib.import_module(ALGORITHMS[name])
    wanted = installed().get(name, name)
    if not user_code.is_file(wanted) and not user_code.is_importable(wanted):
        near = difflib.get_close_matches(name.lower(), [*ALGORITHMS, *installed()], n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"there is no algorithm {name!r}, and no module of that name can be imported. {hint}"
            f"Algorithms: {', '.join([*ALGORITHMS, *installed()])}; or the module or file of your own, as ./a2c.py"
        )
    module = user_code.load(wanted)
    problems = algorithm_problems(module)
    if problems:
        raise UsageError([f"{name} is not an algorithm: {problem}" for problem in problems])
    return module
