"""Everything that can go wrong between a head and its workers, made to happen: for `shoal verify`."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from typing import Any, Self

from shoal.engines.base import Engine
from shoal.runs.metrics import MetricsRow
from shoal.testing.redis_rig import Rig

WHAT = "workers killed, stopped and added each iteration, the server restarted and flushed"
LEASE = 4.0
"""Seconds after which a head that is tried so gives up on a worker that was stopped."""
_WITHIN = 20.0  # seconds for something to happen that the next fault waits for


class Faults:
    """A tracker that in each iteration, once its first task is done, kills a worker, stops one and adds one.

    In one iteration it also kills and restarts the server, in one it flushes it.
    """

    def __init__(self, rig: Rig, engine: Engine, iterations: int) -> None:
        self._rig, self._engine = rig, engine
        self._restart_in, self._flush_in = min(2, iterations), min(3, iterations)
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # One thread for all: what it starts ends with it.
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._todo.put(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._todo.put(None)
        self._thread.join()

    def write(self, metrics: MetricsRow) -> None:
        """An iteration is over, so the next one begins."""
        self._todo.put(metrics["iteration"] + 1)

    def close(self) -> None:
        """No more."""

    def _work(self) -> None:
        while (iteration := self._todo.get()) is not None:
            before = self._engine.telemetry().tasks
            self._wait(lambda before=before: self._engine.telemetry().tasks > before)
            if not self._todo.empty():
                continue  # the iteration is over already, or the run is
            self._rig.add_machine(1)
            killed = self._hit(signal.SIGKILL, spare=0)
            self._hit(signal.SIGSTOP, spare=killed)
            if iteration == self._restart_in:
                self._rig.restart_server()
            if iteration == self._flush_in:
                self._rig.flush()

    def _hit(self, number: int, spare: int) -> int:
        """Send a signal to the oldest worker of the run but one, and say which it was."""
        found: list[int] = []

        def there() -> bool:
            found[:] = [pid for pid in self._engine.pids if pid != spare]
            return bool(found)

        self._wait(there)
        if found:
            with contextlib.suppress(ProcessLookupError):  # it is gone already
                os.kill(found[0], number)
        return found[0] if found else 0

    def _wait(self, holds: Any) -> None:
        deadline = time.monotonic() + _WITHIN
        while not holds() and self._todo.empty() and time.monotonic() < deadline:
            time.sleep(0.002)
