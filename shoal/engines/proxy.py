"""One engine for several heads: the process that owns it serves proxies, one in each head's process.

The messages are those between a head and its workers, with the owner in the worker's place. So heads share workers and
nothing else: each is a separate process, with its own random numbers and learner threads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any, TypedDict

from shoal.base import signals
from shoal.engines import wire
from shoal.engines.base import Engine
from shoal.engines.functions import Functions, name_of
from shoal.engines.scheduler import Telemetry
from shoal.engines.shared_values import SharedValues
from shoal.engines.wire import Kind, Message, Shared
from shoal.engines.worker import SocketChannel, rebuild_error
from shoal.errors import EngineClosed, EngineError, ShoalError, TaskFailed


class _Done(TypedDict):
    """Body of DONE from the owner. `telemetry` holds the fields of `Telemetry` in order."""

    telemetry: list[float]
    result: Any


class _Failed(TypedDict):
    """Body of FAILED from the owner: the error as the owner's future raised it."""

    telemetry: list[float]
    type: str
    message: str
    trace: str


class EngineServer:
    """Runs the tasks of one proxy on an engine, until the proxy closes its end of the connection or dies.

    `client` names the proxy: tasks of different proxies with equal keys are not related.
    """

    def __init__(self, engine: Engine, connection: socket.socket, client: str) -> None:
        self._engine, self._connection, self._client = engine, connection, client
        self._channel = SocketChannel(connection)
        self._functions = Functions(allow=None)
        self._shared: dict[int, Shared] = {}
        self._unfinished: set[Future[Any]] = set()
        self._replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Serve until the proxy is gone, then cancel its unfinished tasks."""
        writer = threading.Thread(target=self._write, name=f"shoal-proxy-{self._client}", daemon=True)
        writer.start()
        try:
            while (message := self._channel.receive()) is not None:
                self._handle(message)
        finally:
            for future in list(self._unfinished):
                future.cancel()
            self._replies.put(None)
            writer.join()
            self._connection.close()

    def _handle(self, message: Message) -> None:
        if message.kind == Kind.SHARE:
            self._shared[message.number] = self._engine.share(wire.decode(message.frame))
        elif message.kind == Kind.FORGET:
            self._shared.pop(message.number, None)
        else:
            future = self._submit(message)
            self._unfinished.add(future)
            future.add_done_callback(functools.partial(self._reply, message.number))

    def _submit(self, message: Message) -> Future[Any]:
        name, args, key = wire.decode(message.frame, self._shared)
        try:
            function = self._functions.find(name)
            return self._engine.submit(function, *args, key=f"{key} of {self._client}" if key else None)
        except Exception as error:  # the engine is closed, or the function cannot be imported
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _reply(self, number: int, future: Future[Any]) -> None:
        self._unfinished.discard(future)
        if future.cancelled():
            return
        telemetry = list(astuple(self._engine.telemetry()))
        error = future.exception()
        if error is None:
            done: _Done = {"telemetry": telemetry, "result": future.result()}
            self._replies.put(Message(Kind.DONE, number, wire.encode(done)))
        else:
            trace = error.remote_traceback if isinstance(error, TaskFailed) else ""
            message = str(error).removesuffix(trace).rstrip()
            failed: _Failed = {
                "telemetry": telemetry,
                "type": type(error).__name__,
                "message": message,
                "trace": trace,
            }
            self._replies.put(Message(Kind.FAILED, number, wire.encode(failed)))

    def _write(self) -> None:
        # In a separate thread: the engine's thread settles futures and must not wait for a slow proxy.
        with contextlib.suppress(OSError):  # the proxy is gone, which `serve` notices too
            while (reply := self._replies.get()) is not None:
                self._channel.send(reply)


class EngineProxy(Engine):
    """Stands for an engine of another process, at the other end of a connection. Telemetry covers all its proxies."""

    def __init__(self, connection: socket.socket, workers: int) -> None:
        super().__init__(workers)
        self._connection = connection
        self._channel = SocketChannel(connection)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._shared = SharedValues()
        self._telemetry = Telemetry()
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="shoal-proxy", daemon=True)
        self._reader.start()

    def share(self, value: object) -> Shared:
        """Send a value to the owner at once; from there it goes to each worker that needs it."""
        shared = self._shared.add(next(self._numbers), value)
        self._send(Message(Kind.SHARE, shared.number, shared.frame))
        return shared

    def submit(self, function: Callable[..., object], /, *args: object, key: Hashable = None) -> Future[Any]:
        """Run `function(*args)` on one of the owner's workers."""
        name = name_of(function)
        call = (name, list(args), None if key is None else str(key))
        frame, shared = wire.encode_with_shared(call, f"an argument of {name}")
        self._shared.refuse_others(shared)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        with self._lock:
            self._futures[number] = future
        for released in self._shared.released():
            self._send(Message(Kind.FORGET, released))
        self._send(Message(Kind.TASK, number, frame))
        return future

    def close(self) -> None:
        """Close the connection. The owner's engine stays open."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):  # the owner closed first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()

    def telemetry(self) -> Telemetry:
        """Return the counters of the owner's engine, as of the last result."""
        return self._telemetry

    def _send(self, message: Message) -> None:
        with signals.held(), self._lock:  # a signal must not leave half a message behind
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


def _error(body: _Failed) -> ShoalError:
    own = rebuild_error(body["type"], body["message"], body["trace"])
    return own or EngineError(f"the engine's owner raised {body['type']}: {body['message']}")


def _closed() -> EngineClosed:
    return EngineClosed("the process that owns this engine has closed it or ended")
