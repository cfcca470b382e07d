"""How the learner uses JAX: a fixed number of threads, a cache of compiled code, and two calls at the same time.

On the CPU, XLA computes different bits with a different number of threads, so the number belongs to the run, not to the
machine. XLA reads it from the variable NPROC at JAX's first computation; after that it cannot change.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import UsageError

One = TypeVar("One")
Other = TypeVar("Other")

log = logging.getLogger("shoal.learner")

WIDE = 512
"""Width from which on more than one thread pays off (measured: one thread is faster for two layers of 64)."""


def threads_for(hidden: Sequence[int]) -> int:
    """Choose the number of learner threads. It depends on the network alone, so that every machine agrees."""
    return 4 if max(hidden, default=0) >= WIDE else 1


_started: int | None = None


def start(threads: int) -> None:
    """Make JAX use this many threads. Call this before JAX's first computation."""
    global _started  # noqa: PLW0603 - XLA reads the number once per process, so this is a fact about the process
    if _started not in (None, threads):
        raise UsageError(
            f"this run learns with {threads} thread(s), but JAX was started with {_started} in this process and cannot "
            f"change that. Start the run in another process: shoal train ..."
        )
    _started = threads
    os.environ["NPROC"] = str(threads)
    import jax

    # Asynchronous dispatch queues all computations for the same few threads, so that two never run at the same time.
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "jax"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        log.warning("compiled code cannot be cached in %s, so every start is slower: %s", cache, error.strerror)
        return
    for name, value in (
        ("jax_compilation_cache_dir", str(cache)),
        ("jax_persistent_cache_min_compile_time_secs", 0.1),
        ("jax_persistent_cache_min_entry_size_bytes", 0),
    ):
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def ready(arrays: Any) -> Any:
    """Wait until all arrays of a tree are computed and on the device: calls that wait for one block other calls."""
    import jax

    return jax.block_until_ready(jax.device_put(arrays))  # type: ignore[no-untyped-call]


def together(one: Callable[[], One], other: Callable[[], Other]) -> tuple[One, Other]:
    """Call two functions at the same time. Compiled code runs on two cores if its arrays are `ready`."""
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(other)
        return one(), later.result()
