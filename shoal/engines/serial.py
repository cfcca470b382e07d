"""The engine without workers: `submit` runs the task at once, in this process, where debuggers and profilers see it.

Arguments and results pass through the wire format all the same, so that what works here works on every engine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from shoal.base.blas import one_thread
from shoal.base.host import available_cores
from shoal.engines import wire
from shoal.engines.base import Engine
from shoal.engines.functions import name_of
from shoal.engines.scheduler import Telemetry
from shoal.engines.wire import DoneBody, FailedBody, Kind, Message, Shared
from shoal.engines.worker import Server, task_error
from shoal.errors import EngineClosed


class SerialEngine(Engine):
    """Runs every task in the calling thread, inside `submit`."""

    def __init__(self, workers: int | None = None) -> None:
        super().__init__(workers=1)
        self._server = Server(allow=None)
        self._numbers = itertools.count()
        self._turn = threading.RLock()
        self._telemetry = Telemetry()
        self._closed = False
        self._one_thread = one_thread()  # as in every worker: more BLAS threads change bits

    @property
    def shared_cores(self) -> int:
        return available_cores()

    def share(self, value: object) -> Shared:
        """Encode a value once for all tasks that refer to it."""
        return Shared(next(self._numbers), wire.encode(value, "the shared value"))

    def submit(self, function: Callable[..., object], /, *args: object, key: Hashable = None) -> Future[Any]:
        """Run `function(*args)` now; the future is done when this returns.

        Threads take turns: an evaluation may begin while the learner's process still has a task here.
        """
        if self._closed:
            raise EngineClosed("this engine is closed; make a new one with shoal.engine(...)")
        name = name_of(function)
        self._server.functions.remember(name, function)
        frame, shared = wire.encode_with_shared((name, list(args)), f"an argument of {name}")
        with self._turn:
            self._server.shared = {item.number: wire.decode(item.frame) for item in shared}
            reply = self._server.run(Message(Kind.TASK, 0, frame))
        future: Future[Any] = Future()
        if reply.kind == Kind.DONE:
            done: DoneBody = wire.decode(reply.frame)
            seconds = done["seconds"]
            future.set_result(done["result"])
        else:
            failed: FailedBody = wire.decode(reply.frame)
            seconds = failed["seconds"]
            future.set_exception(task_error(failed, f"task {name}"))
        self._telemetry.tasks += 1
        self._telemetry.busy_seconds += seconds
        return future

    def close(self) -> None:
        """Give BLAS its threads back."""
        if not self._closed:
            self._closed = True
            self._one_thread.__exit__(None, None, None)

    def telemetry(self) -> Telemetry:
        return self._telemetry
