"""The command `bench`, which needs a checkout: the benchmarks are not part of the installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import shoal
from shoal.errors import UsageError


def bench(words: list[str]) -> int:
    """Measure Shoal compared with its peers and the bare environment."""
    checkout = Path(shoal.__file__).parents[1]
    if not (checkout / "bench" / "command.py").is_file():
        raise UsageError(
            f"the benchmarks are not installed with Shoal (looked in {checkout}). Clone the repository, run "
            f"`pip install -e .` in it, and run the same command there"
        )
    sys.path.insert(0, str(checkout))
    code: int = importlib.import_module("bench.command").bench(words)
    return code
