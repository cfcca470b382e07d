"""The engine with no workers but the caller: tasks run at once, where a debugger and a profiler see them.

Arguments and results pass through the wire all the same, so that whatever works here works everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from shoal.base.blas import one_thread
from shoal.engines import wire
from shoal.engines.base import Engine
from shoal.engines.functions import name_of
from shoal.engines.scheduler import Telemetry
from shoal.engines.wire import Kind, Message, Shared
from shoal.engines.worker import Server, failure
from shoal.errors import EngineClosed


class SerialEngine(Engine):
    """Runs every task in the calling thread, inside `submit`."""

    def __init__(self, workers: int | None = None) -> None:
        super().__init__(workers=1)
        self._server = Server(allow=None)
        self._numbers = itertools.count()
        self._telemetry = Telemetry()
        self._closed = False
        self._one_thread = one_thread()  # as in every worker: more BLAS threads change bits

    def share(self, value: Any) -> Shared:
        """Keep a value for the tasks that refer to it."""
        return Shared(next(self._numbers), wire.encode(value, "the shared value"))

    def submit(self, function: Callable[..., Any], /, *args: Any, key: Hashable = None) -> Future[Any]:
        """Run `function(*args)` now; the future is done when this returns."""
        if self._closed:
            raise EngineClosed("this engine is closed; make a new one with shoal.engine(...)")
        name = name_of(function)
        self._server.functions.remember(name, function)
        frame, shared = wire.encode_with_shared((name, list(args)), f"an argument of {name}")
        self._server.shared = {item.number: wire.decode(item.frame) for item in shared}
        reply = self._server.handle(Message(Kind.TASK, 0, frame))
        if reply is None:
            raise AssertionError("a server answers every task")
        body = wire.decode(reply.frame)
        self._telemetry.tasks += 1
        self._telemetry.busy_seconds += body["seconds"]
        future: Future[Any] = Future()
        if reply.kind == Kind.FAILED:
            future.set_exception(failure(body, f"task {name}"))
        else:
            future.set_result(body["result"])
        return future

    def close(self) -> None:
        """Give BLAS its threads back."""
        if not self._closed:
            self._closed = True
            self._one_thread.__exit__(None, None, None)

    def telemetry(self) -> Telemetry:
        """Counters since the start."""
        return self._telemetry
