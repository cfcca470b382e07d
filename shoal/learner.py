"""How the head starts JAX: a fixed number of threads and a cache of compiled code.

XLA on the CPU gives other bits with another number of threads, so the number is a setting of the run and not of the
machine. It is read from the variable NPROC when JAX is first used, and cannot be changed after.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import UsageError

WIDE = 512
"""From this layer width on, more than one thread pays (measured: one thread is faster for two layers of 64)."""


def threads_for(hidden: Sequence[int]) -> int:
    """The number of learner threads for a network. Depends on the network alone, so that every machine agrees."""
    return 4 if max(hidden, default=0) >= WIDE else 1


def start(threads: int) -> None:
    """Make JAX use this many threads. Call before anything imports JAX."""
    if "jax" in sys.modules and os.environ.get("NPROC") != str(threads):
        raise UsageError(
            f"this run learns with {threads} thread(s), but JAX was loaded before with NPROC={os.environ.get('NPROC')}. "
            f"Set NPROC={threads} in the environment before Python starts, or use a new process"
        )
    os.environ["NPROC"] = str(threads)
    import jax

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "jax"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
