"""Stop signals as an exception in the main thread, deferred while something must not be interrupted.

The signals are SIGINT, SIGTERM and SIGUSR2; mpirun and batch systems pass the last one on to the processes they start.

While `listening`, a signal raises `Stopped` wherever the main thread is, so a long wait ends at once. Inside `held` the
signal takes effect at the end of the block, so a checkpoint or a message is always written completely. A signal that
arrives while JAX is on the stack is also deferred, to the end of the next `held` block: JAX calls Python from C++,
where an exception can end the process or get lost. There `Stopped` is also raised again if it got lost elsewhere, as in
a destructor. A second signal exits immediately.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from shoal.errors import Stopped

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""Signals that ask a process to save its work and stop."""

Handler = Callable[[int, FrameType | None], object]
_depth = 0  # number of `held` blocks the main thread is in
_received: int | None = None


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Raise `Stopped` on a stop signal during a block. Does nothing outside the main thread."""
    global _received  # noqa: PLW0603 - signals belong to the process
    _received = None
    try:
        with handled_by(_handle):
            yield
    finally:
        _received = None


@contextlib.contextmanager
def handled_by(handler: Handler, numbers: Sequence[int] = STOP) -> Iterator[None]:
    """Install a signal handler during a block, then restore the previous handlers.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    previous: dict[int, Handler | int | None] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _handle(number: int, frame: FrameType | None) -> None:
    global _received  # noqa: PLW0603
    if _received is not None:
        os._exit(128 + number)  # workers end with this process
    _received = number
    if _depth == 0 and not _in_jax(frame):
        _stop()


def _in_jax(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "jaxlib"):
            return True
        frame = frame.f_back
    return False


def _stop() -> None:
    """Raise `Stopped`, unless one is already being handled: then this runs during clean-up."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    if _received is not None and error is None:
        raise Stopped(_received)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Defer stop signals that arrive during a block to its end."""
    global _depth  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
    if _depth == 0:
        _stop()
