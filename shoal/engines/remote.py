"""An engine whose workers are elsewhere: the scheduler, one thread that pumps messages, and a transport.

A transport only moves messages and says who came and who went. It is polled by the pump thread; `send` may also be
called by the thread that submits, so that a task leaves at once.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shoal.base import signals
from shoal.engines import wire
from shoal.engines.base import Engine
from shoal.engines.fingerprint import difference, fingerprint
from shoal.engines.functions import main_script, name_of
from shoal.engines.scheduler import Command, Fail, GiveUp, Notice, Resolve, Scheduler, Send, Ship, Telemetry
from shoal.engines.wire import Kind, Message, Shared
from shoal.engines.worker import failure
from shoal.errors import EngineClosed, EngineError, ShoalError, UsageError, WireError, WorkerRefused

log = logging.getLogger("shoal.engine")


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a worker. The first one is its HELLO."""

    worker: int
    message: Message


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker is alive."""

    worker: int


@dataclass(frozen=True, slots=True)
class Left:
    """A worker is gone, and why."""

    worker: int
    reason: str
    fault: bool = True
    """Whether it died; False where it was called away, or only the way to it was lost."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The transport cannot get workers at all."""

    error: EngineError


Event = Received | Heard | Left | Broken


class Transport(Protocol):
    """Moves messages between the head and its workers."""

    def poll(self, timeout: float) -> Sequence[Event]:
        """What happened, waiting at most `timeout` seconds. Only ever called by one thread."""

    def send(self, worker: int, message: Message) -> None:
        """Queue a message without blocking; nothing if the worker is gone. Any thread may call."""

    def wake(self) -> None:
        """Make a `poll` that is under way return."""

    def drop(self, worker: int) -> None:
        """End a worker that was given up or refused."""

    def refuse(self, worker: int, error: WorkerRefused) -> Sequence[Event]:
        """A worker would compute other bits. `Broken` where all workers are of one install; else only it has to go."""

    def close(self) -> None:
        """End all workers. Called by the pump thread, last."""


@dataclass(slots=True)
class _Call:
    future: Future[Any]
    frame: bytearray
    label: str
    shared: list[Shared]  # keeps them alive until the task is done


_Settled = tuple[Future[Any], Any, ShoalError | None]  # a future, and the result or error that it gets


class RemoteEngine(Engine):
    """Everything that the engines with workers of their own have in common."""

    largest = wire.MAX_FRAME
    """Bytes of the largest frame that the transport carries."""

    def __init__(self, transport: Transport, *, workers: int, scheduler: Scheduler, allow_mixed: bool = False) -> None:
        super().__init__(workers)
        self._transport = transport
        self._scheduler = scheduler
        self._allow_mixed = allow_mixed
        self._lock = threading.RLock()
        self._calls: dict[int, _Call] = {}
        self._shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()
        self._forgotten: list[int] = []
        self._numbers = itertools.count()
        self._closed = False
        self._broken: EngineError | None = None
        self._fingerprint = fingerprint()
        self._pump_thread = threading.Thread(target=self._pump, name="shoal-engine", daemon=True)
        atexit.register(self.close)
        self._pump_thread.start()

    # What callers use -----------------------------------------------------------------------------------------

    def share(self, value: Any) -> Shared:
        """Ship a value once to each worker that needs it; pass the result to tasks in its place."""
        shared = Shared(next(self._numbers), wire.encode(value, "the shared value", self.largest))
        self._shared[shared.number] = shared
        # A finalizer may run at any moment in any thread, so it only leaves a note.
        weakref.finalize(shared, self._forgotten.append, shared.number)
        return shared

    def submit(self, function: Callable[..., Any], /, *args: Any, key: Hashable = None) -> Future[Any]:
        """Run `function(*args)` on a worker. Tasks with equal keys prefer the same worker."""
        name = name_of(function)
        frame, shared = wire.encode_with_shared((name, list(args)), f"an argument of {name}", self.largest)
        for item in shared:
            if self._shared.get(item.number) is not item:
                raise UsageError(f"{item} was shared with another engine. Share the value again with this one")
        label = f"task {name}" if key is None else f"task {name} of {key}"
        future: Future[Any] = Future()
        with signals.held(), self._lock:  # half a message would confuse the worker
            if self._broken is not None:
                raise self._broken
            if self._closed:
                raise EngineClosed("this engine is closed; make a new one with shoal.engine(...)")
            number = next(self._numbers)
            self._calls[number] = _Call(future, frame, label, shared)
            needs = [item.number for item in shared]
            commands = self._scheduler.submit(time.monotonic(), number, label, key, needs)
            settled = self._obey(commands)
        _settle(settled)
        return future

    def close(self) -> None:
        """End the workers. Tasks that are not done fail with `EngineClosed`. Closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._transport.wake()
        if threading.current_thread() is not self._pump_thread:
            self._pump_thread.join()
        atexit.unregister(self.close)

    def telemetry(self) -> Telemetry:
        """Counters since the start: tasks, busy seconds, lost workers."""
        with self._lock:
            return replace(self._scheduler.telemetry)

    # The pump -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        try:
            while not self._closed:
                events = self._transport.poll(self._scheduler.wait())
                with self._lock:
                    now = time.monotonic()
                    commands: list[Command] = []
                    for event in events:
                        commands += self._take(now, event)
                    commands += self._scheduler.tick(now)
                    settled = self._obey(commands)
                    self._forget()
                _settle(settled)
        except BaseException as error:
            log.exception("the engine's own thread failed; this is a bug in Shoal")
            self._broken = EngineError(f"the engine's thread failed: {error!r}")
        finally:
            with self._lock:
                self._closed = True
            self._transport.close()
            with self._lock:
                why = self._broken or EngineClosed("the engine was closed before this task was done")
                unfinished: list[_Settled] = [(call.future, None, why) for call in self._calls.values()]
                self._calls.clear()
            _settle(unfinished)

    def _take(self, now: float, event: Event) -> list[Command]:
        if isinstance(event, Heard):
            return self._scheduler.heard(now, event.worker)
        if isinstance(event, Left):
            return self._scheduler.left(now, event.worker, event.reason, event.fault)
        if isinstance(event, Broken):
            self._broken = event.error
            self._closed = True
            return []
        kind, number, frame = event.message
        try:
            body = _body(kind, frame)
        except WireError as error:  # it may be anybody's bytes; what they ask for is not done
            self._transport.drop(event.worker)
            return self._scheduler.left(now, event.worker, f"sent what no worker sends: {error}")
        if kind == Kind.HELLO:
            return self._admit(now, event.worker, body)
        return self._scheduler.received(now, event.worker, number, (kind, body), body["seconds"])

    def _admit(self, now: float, worker: int, theirs: dict[str, str]) -> list[Command]:
        differs = difference(self._fingerprint, theirs)
        if differs and not self._allow_mixed:
            error = WorkerRefused(
                f"worker {worker} would not compute the same bits as the head ({differs}). Install the same versions "
                f"on a CPU of the same family, or pass --allow-mixed and give up equal results"
            )
            return [command for event in self._transport.refuse(worker, error) for command in self._take(now, event)]
        self._transport.send(worker, Message(Kind.WELCOME, 0, wire.encode(self._settings())))
        return self._scheduler.joined(now, worker)

    def _settings(self) -> dict[str, Any]:
        """What a worker needs to find the functions of this process."""
        return {"path": list(sys.path), "main": main_script(), "allow": None}

    def _obey(self, commands: list[Command]) -> list[_Settled]:
        """Carry commands out. Futures are settled by the caller, outside the lock, because callbacks may submit."""
        settled: list[_Settled] = []
        for command in commands:  # may grow while it is read
            match command:
                case Send(worker, ticket, task):
                    call = self._calls[task]
                    if call.future.running() or call.future.set_running_or_notify_cancel():
                        self._transport.send(worker, Message(Kind.TASK, ticket, call.frame))
                    else:  # cancelled in the meantime: let the scheduler count it as done
                        commands += self._scheduler.received(time.monotonic(), worker, ticket, None, seconds=None)
                case Ship(worker, number):
                    shared = self._shared[number]
                    self._transport.send(worker, Message(Kind.SHARE, number, shared.frame))
                case Resolve(task, outcome):
                    call = self._calls.pop(task)
                    if outcome is not None:
                        kind, body = outcome
                        error = failure(body, call.label) if kind == Kind.FAILED else None
                        settled.append((call.future, body.get("result"), error))
                case Fail(task, error):
                    settled.append((self._calls.pop(task).future, None, error))
                case GiveUp(worker):
                    self._transport.drop(worker)
                case Notice(text):
                    log.warning("%s", text)
        return settled

    def _forget(self) -> None:
        while self._forgotten:
            number = self._forgotten.pop()
            for worker in self._scheduler.forget(number):
                self._transport.send(worker, Message(Kind.FORGET, number))


def _body(kind: int, frame: bytes | bytearray | memoryview) -> dict[str, Any]:
    """What a worker's message says, if it is one."""
    body = wire.decode(frame)
    parts: dict[int, dict[str, type]] = {
        Kind.HELLO: {},
        Kind.DONE: {"seconds": float},
        Kind.FAILED: {"seconds": float, "type": str, "message": str, "traceback": str},
    }
    if kind not in parts or type(body) is not dict:
        raise WireError(f"a message of kind {kind} with {type(body).__name__} in it")
    wrong = [name for name, kind_of in parts[kind].items() if type(body.get(name)) is not kind_of]
    if kind == Kind.HELLO:
        wrong = [str(name) for name, value in body.items() if type(name) is not str or type(value) is not str]
    if wrong:
        raise WireError(f"a message of kind {kind} in which {', '.join(wrong)} is not what it should be")
    return body


def _settle(settled: list[_Settled]) -> None:
    for future, result, error in settled:
        if error is None:
            future.set_result(result)
        elif future.running() or future.set_running_or_notify_cancel():
            future.set_exception(error)
