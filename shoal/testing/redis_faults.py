"""Faults between a head and its workers on Redis, for `shoal verify` and tests.

with RedisRig() as rig:
    rig.add_machine(workers=2)
    with shoal.engine(rig.address, lease=LEASE) as engine, RedisFaults(rig, engine, iterations=10) as faults:
        run.train(..., engine=engine, trackers=[faults])
        engine.close()  # now: a server that was restarted ends with the faults
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Self

from shoal.engines.base import Engine
from shoal.runs.metrics import MetricsRow
from shoal.testing.redis_rig import RedisRig

DESCRIPTION = "workers killed, stopped and added each iteration, the server restarted and flushed"
"""What `RedisFaults` does, for reports."""
LEASE = 4.0
"""A lease in seconds for the engine under test, so that it soon gives up workers that were stopped."""
_WITHIN = 20.0  # seconds to wait for the condition of the next fault


class RedisFaults:
    """A tracker that injects faults into each iteration once its first task is done.

    Each time it adds a machine, kills a worker and stops (SIGSTOP) another. In iteration 2 it also restarts the server,
    in iteration 3 it flushes it; a shorter run has these faults in its last iteration.
    """

    def __init__(self, rig: RedisRig, engine: Engine, iterations: int) -> None:
        self._rig, self._engine = rig, engine
        self._restart_in, self._flush_in = min(2, iterations), min(3, iterations)
        self._iterations: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # those that have begun
        # One thread for all faults: processes that it starts end with it.
        self._thread = threading.Thread(target=self._inject_all, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._iterations.put(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._iterations.put(None)
        self._thread.join()

    def write(self, metrics: MetricsRow) -> None:
        self._iterations.put(metrics["iteration"] + 1)

    def close(self) -> None:
        pass

    def _inject_all(self) -> None:
        while (iteration := self._iterations.get()) is not None:
            self._inject(iteration)

    def _inject(self, iteration: int) -> None:
        before = self._engine.telemetry().tasks
        self._wait(lambda: self._engine.telemetry().tasks > before)
        if not self._iterations.empty():
            return  # the iteration, or the run, is already over
        self._rig.add_machine(1)
        killed = self._signal_worker(signal.SIGKILL, spare=0)
        self._signal_worker(signal.SIGSTOP, spare=killed)
        if iteration == self._restart_in:
            self._rig.restart_server()
        if iteration == self._flush_in:
            self._rig.flush()

    def _signal_worker(self, number: int, spare: int) -> int:
        """Send a signal to the run's oldest worker other than `spare`, and return its process id; 0 if none is left."""
        found: list[int] = []

        def any_worker() -> bool:
            found[:] = [pid for pid in self._engine.pids if pid != spare]
            return bool(found)

        self._wait(any_worker)
        if not found:
            return 0
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(found[0], number)
        return found[0]

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds, the iteration is over, or time is up."""
        deadline = time.monotonic() + _WITHIN
        while not holds() and self._iterations.empty() and time.monotonic() < deadline:
            time.sleep(0.002)
