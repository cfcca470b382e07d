"""One engine for several heads: its owner lends it to processes of its own, which use it as if each had one.

The messages are those between a head and its workers, with the owner in the worker's place. So heads share workers
and nothing else: each has a process, and with it random numbers and learner threads, of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any

from shoal import errors
from shoal.base import signals
from shoal.engines import wire
from shoal.engines.base import Engine
from shoal.engines.functions import Functions, name_of
from shoal.engines.scheduler import Telemetry
from shoal.engines.wire import Kind, Message, Shared
from shoal.engines.worker import SocketChannel
from shoal.errors import EngineClosed, ShoalError, TaskFailed, UsageError


def lend(engine: Engine, connection: socket.socket, borrower: str) -> None:
    """Serve one borrower until it closes its end of a connection or dies. What it has asked for by then is dropped."""
    channel, functions = SocketChannel(connection), Functions(allow=None)
    shared: dict[int, Shared] = {}
    unfinished: set[Future[Any]] = set()
    answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def write() -> None:
        # In a thread of its own: the engine's thread settles futures, and must not wait for a borrower that is slow.
        with contextlib.suppress(OSError):  # the borrower is gone, which the reader sees too
            while (answer := answers.get()) is not None:
                channel.send(answer)

    def settled(number: int, future: Future[Any]) -> None:
        unfinished.discard(future)
        if future.cancelled():
            return
        error = future.exception()
        body: dict[str, Any] = {"telemetry": list(astuple(engine.telemetry()))}
        if error is None:
            body["result"] = future.result()
        else:
            trace = error.remote_traceback if isinstance(error, TaskFailed) else ""
            body |= {"type": type(error).__name__, "message": str(error).removesuffix(trace).rstrip(), "trace": trace}
        answers.put(Message(Kind.DONE if error is None else Kind.FAILED, number, wire.encode(body)))

    writer = threading.Thread(target=write, name=f"shoal-lent-{borrower}", daemon=True)
    writer.start()
    try:
        while (message := channel.receive()) is not None:
            if message.kind == Kind.SHARE:
                shared[message.number] = engine.share(wire.decode(message.frame))
            elif message.kind == Kind.FORGET:
                shared.pop(message.number, None)
            else:
                name, args, key = wire.decode(message.frame, shared)
                try:
                    future = engine.submit(functions.find(name), *args, key=f"{key} of {borrower}" if key else None)
                except Exception as error:  # a closed engine, or a function that cannot be imported
                    future = Future()
                    future.set_exception(error)
                unfinished.add(future)
                future.add_done_callback(lambda done, number=message.number: settled(number, done))  # type: ignore[misc]
    finally:
        for future in list(unfinished):
            future.cancel()
        answers.put(None)
        writer.join()
        connection.close()


class LentEngine(Engine):
    """An engine of another process, at the other end of a connection. Its telemetry is that of all borrowers."""

    def __init__(self, connection: socket.socket, workers: int) -> None:
        super().__init__(workers)
        self._connection = connection
        self._channel = SocketChannel(connection)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()
        self._forgotten: list[int] = []
        self._telemetry = Telemetry()
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="shoal-lent", daemon=True)
        self._reader.start()

    def share(self, value: Any) -> Shared:
        """Ship a value once to the owner, and from there to each worker that needs it."""
        shared = Shared(next(self._numbers), wire.encode(value, "the shared value"))
        self._shared[shared.number] = shared
        # A finalizer may run at any moment in any thread, so it only leaves a note.
        weakref.finalize(shared, self._forgotten.append, shared.number)
        self._send(Message(Kind.SHARE, shared.number, shared.frame))
        return shared

    def submit(self, function: Callable[..., Any], /, *args: Any, key: Hashable = None) -> Future[Any]:
        """Run `function(*args)` on one of the owner's workers."""
        name = name_of(function)
        call = (name, list(args), None if key is None else str(key))
        frame, shared = wire.encode_with_shared(call, f"an argument of {name}")
        for item in shared:
            if self._shared.get(item.number) is not item:
                raise UsageError(f"{item} was shared with another engine. Share the value again with this one")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        with self._lock:
            self._futures[number] = future
        while self._forgotten:
            self._send(Message(Kind.FORGET, self._forgotten.pop()))
        self._send(Message(Kind.TASK, number, frame))
        return future

    def close(self) -> None:
        """Give it back. The workers stay."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):  # the owner was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()

    def telemetry(self) -> Telemetry:
        """Counters of the owner's engine, as of the last result."""
        return self._telemetry

    def _send(self, message: Message) -> None:
        with signals.held(), self._lock:  # half a message would confuse the owner
            if self._closed:
                raise _closed()
            try:
                self._channel.send(message)
            except OSError:
                raise _closed() from None

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._channel.receive()) is not None:
                body = wire.decode(message.frame)
                self._telemetry = Telemetry(*body["telemetry"])
                with self._lock:
                    future = self._futures.pop(message.number)
                if message.kind == Kind.DONE:
                    future.set_result(body["result"])
                else:
                    future.set_exception(_error(body))
        with self._lock:
            self._closed = True
            left = list(self._futures.values())
            self._futures.clear()
        for future in left:
            future.set_exception(_closed())


def _error(body: dict[str, Any]) -> ShoalError:
    kind = getattr(errors, body["type"], None)
    if isinstance(kind, type) and issubclass(kind, ShoalError):
        return kind(body["message"], *filter(None, [body["trace"]]))
    return errors.EngineError(f"the engine that was lent raised {body['type']}: {body['message']}")


def _closed() -> EngineClosed:
    return EngineClosed("the process that lent its engine to this one has closed it or ended")
