"""This machine and this installation: usable cores, thread limits, and how to start another `shoal` process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Environment variables that limit the threads of BLAS libraries. They are read when NumPy loads."""

WORKER_ENVIRONMENT = dict.fromkeys(BLAS_THREADS, "1") | {"PYGAME_HIDE_SUPPORT_PROMPT": "1"}
"""Environment variables that must be set before a worker loads NumPy: more than one BLAS thread changes bits, and
workers that share cores slow each other down."""


def available_cores() -> int:
    """Number of cores this process may use; an allocation or `taskset` may grant fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shoal_command(*words: str) -> list[str]:
    """Command line of a `shoal` child process."""
    return module_command("shoal", *words)


def module_command(module: str, *words: str) -> list[str]:
    """Command line of a child process that runs a module with this interpreter.

    `-P` keeps files in the current folder from shadowing the modules that the child imports.
    """
    return [sys.executable, "-P", "-m", module, *words]


def python_path() -> str:
    """Value of PYTHONPATH that makes a child process import this same copy of Shoal."""
    package = Path(__file__).parents[2]
    return os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
