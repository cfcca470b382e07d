"""How the head uses JAX: a fixed number of threads, a cache of compiled code, and two calls at the same time.

XLA on the CPU gives other bits with another number of threads, so the number is a setting of the run and not of the
machine. It is read from the variable NPROC at JAX's first computation, and cannot be changed after.
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
"""From this layer width on, more than one thread pays (measured: one thread is faster for two layers of 64)."""


def threads_for(hidden: Sequence[int]) -> int:
    """The number of learner threads for a network. Depends on the network alone, so that every machine agrees."""
    return 4 if max(hidden, default=0) >= WIDE else 1


_started: int | None = None


def start(threads: int) -> None:
    """Make JAX use this many threads. Call before its first computation."""
    global _started  # noqa: PLW0603 - XLA reads the number once per process, so this is a fact about the process
    if _started not in (None, threads):
        raise UsageError(
            f"this run learns with {threads} thread(s), but this process has begun to learn with {_started}, which JAX "
            f"cannot change. Start it in a process of its own: shoal train ..."
        )
    _started = threads
    os.environ["NPROC"] = str(threads)
    import jax

    # With it, all computations queue for the same few threads, and two of them never run at the same time.
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "jax"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        log.warning("compiled code is not cached, so every start is slower: %s: %s", cache, error.strerror)
        return
    for name, value in (
        ("jax_compilation_cache_dir", str(cache)),
        ("jax_persistent_cache_min_compile_time_secs", 0.1),
        ("jax_persistent_cache_min_entry_size_bytes", 0),
    ):
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def ready(arrays: Any) -> Any:
    """A tree of arrays, all of them computed and in place: calls that have to wait for one queue up behind others."""
    import jax

    return jax.block_until_ready(jax.device_put(arrays))  # type: ignore[no-untyped-call]


def together(one: Callable[[], One], other: Callable[[], Other]) -> tuple[One, Other]:
    """Call two functions at the same time; compiled code of `ready` arrays then runs on two cores."""
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(other)
        return one(), later.result()
