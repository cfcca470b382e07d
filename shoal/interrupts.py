"""Signals to stop as an exception in the main thread, but never in the middle of what must be whole.

They are SIGINT, SIGTERM, and SIGUSR2, which mpirun and batch systems pass on to what they started.

While `listening`, a signal raises `Stopped` wherever the main thread is, so that a long wait ends at once. Inside of
`held` it waits for the end of the block: a checkpoint is written whole, a message is sent whole. A second signal exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from shoal.errors import Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
_depth = 0  # of `held` blocks that the main thread is in
_received: int | None = None
_raised = False


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Turn signals into `Stopped` for the length of a block. Does nothing outside of the main thread."""
    global _received, _raised  # signals belong to the process
    _received, _raised = None, False
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, _handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _handle(number: int, _: FrameType | None) -> None:
    global _received  # noqa: PLW0603
    if _received is not None:
        os._exit(128 + number)  # workers end with this process
    _received = number
    if _depth == 0:
        _stop()


def _stop() -> None:
    global _raised  # noqa: PLW0603
    if _received is not None and not _raised:
        _raised = True
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
