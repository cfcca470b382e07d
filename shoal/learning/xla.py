"""How the learner uses JAX: a fixed number of threads, a cache of compiled code, and two calls at the same time.

On the CPU, XLA computes different bits with a different number of threads, so the number belongs to the run, not to the
machine. XLA reads it from the variable NPROC at JAX's first computation; after that it cannot change.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from shoal.base.blas import one_thread
from shoal.errors import UsageError

One = TypeVar("One")
Other = TypeVar("Other")

log = logging.getLogger("shoal.learner")

WIDE = 512
"""Width from which on more than one thread pays off (measured: one thread is faster for two layers of 64)."""


def threads_for(hidden: Sequence[int]) -> int:
    """Choose the number of learner threads. It depends on the network alone, so that every machine agrees."""
    return 4 if max(hidden, default=0) >= WIDE else 1


Device = Literal["cpu", "gpu"]

_started: tuple[int, Device] | None = None
_learning = threading.Lock()  # held while a run learns in this process


@contextlib.contextmanager
def claimed(threads: int, device: Device) -> Iterator[bool]:
    """Start JAX for a run that learns in this process during a block; the value is False if it must not.

    It must not if the process has used JAX already in another way, or if another run is learning in it now: libraries
    with global random numbers would mix the two.
    """
    mine = (_started == (threads, device) if _started else not _in_use()) and _learning.acquire(blocking=False)
    try:
        if mine:
            start(threads, device)
            with one_thread():  # as on the command line: more BLAS threads change bits
                yield True
        else:
            yield False
    finally:
        if mine:
            _learning.release()


def _in_use() -> bool:
    """Test whether JAX has computed anything in this process yet. Where that cannot be known, assume that it has."""
    bridge = sys.modules.get("jax._src.xla_bridge")  # JAX has no public function for this
    return bridge is not None and bool(getattr(bridge, "backends_are_initialized", lambda: True)())


def start(threads: int, device: Device = "cpu") -> None:
    """Make JAX use this many threads, and this device. Call this before JAX's first computation."""
    global _started  # noqa: PLW0603 - XLA reads the number once per process, so this is a fact about the process
    if _started not in (None, (threads, device)):
        raise UsageError(
            f"this run learns with {threads} thread(s) on the {device}, but JAX was started with {_started[0]} on the "
            f"{_started[1]} in this process and cannot change that. Start the run in another process: shoal train ..."
        )
    os.environ["NPROC"] = str(threads)
    import jax

    # An installed CUDA build of JAX would choose the GPU, and so other bits, by itself.
    jax.config.update("jax_platforms", "cpu" if device == "cpu" else "cuda")  # type: ignore[no-untyped-call]
    if device == "gpu":
        _require_gpu()
    _started = (threads, device)
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


def _require_gpu() -> None:
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion where JAX was built without support for GPUs
        why = f" ({error})" if str(error) else ""
        jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call] # for runs that learn there
        raise UsageError(
            f"device gpu: JAX finds no GPU here{why}. Install JAX for it (pip install 'jax[cuda12]'), or use "
            f"the device cpu"
        ) from None


def ready(arrays: Any) -> Any:
    """Wait until all arrays of a tree are computed and on the device: calls that wait for one block other calls."""
    import jax

    return jax.block_until_ready(jax.device_put(arrays))  # type: ignore[no-untyped-call]


def together(one: Callable[[], One], other: Callable[[], Other]) -> tuple[One, Other]:
    """Call two functions at the same time. Compiled code runs on two cores if its arrays are `ready`."""
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(other)
        return one(), later.result()
