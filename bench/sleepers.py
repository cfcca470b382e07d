"""Workers that only sleep, hundreds of them in one process, to measure the head and the messages alone.

They belong to a real supervisor (`shoal worker`), which passes their messages on; only the processes are simulated.

    python -m bench.sleepers ADDRESS COUNT
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence

from shoal.engines import wire
from shoal.engines.fingerprint import fingerprint
from shoal.engines.redis.address import find_server
from shoal.engines.redis.supervisor import Supervisor
from shoal.engines.remote import Event, Heard, Received
from shoal.engines.wire import Kind, Message


def sleep(seconds: float) -> None:
    """Task: do nothing for a while."""
    time.sleep(seconds)


class Sleepers:
    """Replaces worker processes: each simulated worker takes a task and answers when its time is over."""

    def __init__(self, count: int) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._due: list[tuple[float, int, int, float]] = []  # when, worker, ticket, seconds
        self._free_at: dict[int, float] = {}
        self._hello = wire.encode(fingerprint())
        self._new = [next(self._numbers) for _ in range(count)]
        self._heard_at = 0.0

    def poll(self, timeout: float) -> Sequence[Event]:
        with self._lock:
            first = self._due[0][0] - time.monotonic() if self._due else timeout
        if not self._new:
            self._woken.wait(max(min(timeout, first), 0.0))
        self._woken.clear()
        now = time.monotonic()
        events: list[Event] = []
        for number in self._new:
            self._free_at[number] = now
            events.append(Received(number, Message(Kind.HELLO, 0, self._hello)))
        self._new = []
        with self._lock:
            while self._due and self._due[0][0] <= now:
                _, worker, ticket, seconds = heapq.heappop(self._due)
                if worker in self._free_at:
                    frame = wire.encode({"seconds": seconds, "result": None})
                    events.append(Received(worker, Message(Kind.DONE, ticket, frame)))
        if now >= self._heard_at:
            self._heard_at = now + 1.0
            events += [Heard(number) for number in self._free_at]
        return events

    def send(self, worker: int, message: Message) -> None:
        """Schedule the answer to a task, after the worker's earlier tasks."""
        if message.kind == Kind.TASK:
            _, (seconds,) = wire.decode(message.frame)
            with self._lock:
                begun = max(time.monotonic(), self._free_at[worker])
                self._free_at[worker] = begun + seconds
                heapq.heappush(self._due, (begun + seconds, worker, message.number, seconds))

    def wake(self) -> None:
        self._woken.set()

    def drop(self, worker: int) -> None:
        """Replace a worker."""
        self._free_at.pop(worker, None)
        self._new.append(next(self._numbers))

    def numbered_pids(self) -> dict[int, int]:
        """Return this process for every worker."""
        return dict.fromkeys(self._free_at, os.getpid())

    def close(self) -> None:
        """Do nothing: there are no processes."""


def main() -> None:
    """Serve tasks until the process is killed."""
    address, count = sys.argv[1], int(sys.argv[2])
    Supervisor(find_server(address), count, [__spec__.name], timeout=5.0, processes=Sleepers(count)).serve()


if __name__ == "__main__":
    main()
