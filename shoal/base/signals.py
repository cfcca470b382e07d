"""Signals to stop as an exception in the main thread, but never in the middle of what must be whole.

They are SIGINT, SIGTERM, and SIGUSR2, which mpirun and batch systems pass on to what they started.

While `listening`, a signal raises `Stopped` wherever the main thread is, so that a long wait ends at once. Inside of
`held` it waits for the end of the block: a checkpoint is written whole, a message is sent whole. It also waits for the
end of the next such block where an exception would not arrive: JAX calls Python from C++, which may end the process or
lose the exception, and so may whatever calls a destructor. A second signal exits.
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
"""Signals that ask a process to save and stop."""

Handler = Callable[[int, FrameType | None], object]
_depth = 0  # of `held` blocks that the main thread is in
_received: int | None = None


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Turn signals into `Stopped` for the length of a block. Does nothing outside the main thread."""
    global _received  # noqa: PLW0603 - signals belong to the process
    _received = None
    try:
        with handled_by(_handle):
            yield
    finally:
        _received = None


@contextlib.contextmanager
def handled_by(handler: Handler, numbers: Sequence[int] = STOP) -> Iterator[None]:
    """Handle signals for the length of a block, then restore the previous handlers.

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
    """Raise, unless that is what is going on already: then this is part of cleaning up."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    if _received is not None and error is None:
        raise Stopped(_received)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A block that signals do not interrupt; one that came meanwhile takes effect at its end."""
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
