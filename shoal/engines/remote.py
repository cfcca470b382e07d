"""Base of all engines with worker processes: the scheduler, one thread that pumps messages, and a transport.

A transport only moves messages and reports which workers joined or left. The pump thread polls it; `send` may also be
called by the thread that submits, so that a task is sent at once.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from shoal.base import signals
from shoal.engines import wire
from shoal.engines.base import Engine
from shoal.engines.fingerprint import difference, fingerprint
from shoal.engines.functions import main_script, name_of, with_digest
from shoal.engines.scheduler import Command, Fail, GiveUp, Notice, Resolve, Scheduler, Send, Ship, Telemetry
from shoal.engines.shared_values import SharedValues
from shoal.engines.wire import Buffer, FailedBody, Kind, Message, Shared, WorkerSettings
from shoal.engines.worker import task_error
from shoal.errors import EngineClosed, EngineError, ShoalError, WireError, WorkerRefused

log = logging.getLogger("shoal.engine")


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a worker arrived. The first one is its HELLO."""

    worker: int
    message: Message


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker gave a sign of life."""

    worker: int


@dataclass(frozen=True, slots=True)
class Left:
    """A worker is gone."""

    worker: int
    reason: str
    fault: bool = True
    """Whether the worker died; False where it left on request or only the connection was lost."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The transport cannot get workers at all."""

    error: EngineError


Event = Received | Heard | Left | Broken


class Transport(Protocol):
    """Moves messages between the head and its workers."""

    def poll(self, timeout: float) -> Sequence[Event]:
        """Return what happened, waiting at most `timeout` seconds. Called by the pump thread only."""

    def send(self, worker: int, message: Message) -> None:
        """Queue a message without blocking; do nothing if the worker is gone. Any thread may call."""

    def wake(self) -> None:
        """Make a `poll` in progress return."""

    def drop(self, worker: int) -> None:
        """End a worker that the head has given up or refused."""

    def refuse(self, worker: int, error: WorkerRefused) -> Sequence[Event]:
        """Turn away a worker that would compute other bits; return `Broken` if no other worker could do better."""

    def close(self) -> None:
        """End all workers. The last call that the pump thread makes."""


@dataclass(slots=True)
class _Call:
    future: Future[Any]
    frame: bytearray
    label: str
    shared: list[Shared]  # keeps them alive until the task is done


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A worker's reply to a task."""

    seconds: float
    result: object = None
    failed: FailedBody | None = None


_Settled = tuple[Future[Any], object, ShoalError | None]  # a future, and the result or error that it gets


class RemoteEngine(Engine):
    """What all engines with worker processes have in common."""

    largest = wire.MAX_FRAME
    """Bytes of the largest frame that the transport carries."""

    def __init__(self, transport: Transport, *, workers: int, scheduler: Scheduler, allow_mixed: bool = False) -> None:
        super().__init__(workers)
        self._transport = transport
        self._scheduler = scheduler
        self._allow_mixed = allow_mixed
        self._lock = threading.RLock()
        self._calls: dict[int, _Call] = {}
        self._shared = SharedValues()
        self._numbers = itertools.count()
        self._closed = False
        self._broken: EngineError | None = None
        self._fingerprint = fingerprint()
        self._pump_thread = threading.Thread(target=self._pump, name="shoal-engine", daemon=True)
        atexit.register(self.close)
        self._pump_thread.start()

    # Called by the user's threads ------------------------------------------------------------------------------

    def share(self, value: object) -> Shared:
        return self._shared.add(next(self._numbers), value, self.largest)

    def submit(self, function: Callable[..., object], /, *args: object, key: Hashable = None) -> Future[Any]:
        name = name_of(function)
        wanted = name if self._allow_mixed else with_digest(name)
        frame, shared = wire.encode_with_shared((wanted, list(args)), f"an argument of {name}", self.largest)
        self._shared.refuse_others(shared)
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
            settled = self._carry_out(commands)
        _settle(settled)
        return future

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._transport.wake()
        if threading.current_thread() is not self._pump_thread:
            self._pump_thread.join()
        atexit.unregister(self.close)

    def telemetry(self) -> Telemetry:
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
                    settled = self._carry_out(commands)
                    self._forget()
                _settle(settled)
        except BaseException as error:
            log.exception("the engine's thread failed; this is a bug in Shoal")
            self._broken = EngineError(f"the engine's thread failed: {error!r}")
        finally:
            with self._lock:
                self._closed = True
            self._transport.close()
            with self._lock:
                why = self._broken or EngineClosed("the engine was closed before this task finished")
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
            content: dict[str, str] | _Outcome = _hello(frame) if kind == Kind.HELLO else _outcome(kind, frame)
        except WireError as error:  # the bytes may come from anywhere, so nothing in them is acted on
            self._transport.drop(event.worker)
            return self._scheduler.left(now, event.worker, f"sent an invalid message: {error}")
        if isinstance(content, _Outcome):
            return self._scheduler.received(now, event.worker, number, content, content.seconds)
        return self._admit(now, event.worker, content)

    def _admit(self, now: float, worker: int, theirs: dict[str, str]) -> list[Command]:
        differs = difference(self._fingerprint, theirs)
        if differs and not self._allow_mixed:
            error = WorkerRefused(
                f"worker {worker} would not compute the same bits as the head ({differs}). Install the same versions "
                f"on a CPU of the same family, or pass --allow-mixed to accept results that differ"
            )
            return [command for event in self._transport.refuse(worker, error) for command in self._take(now, event)]
        self._transport.send(worker, Message(Kind.WELCOME, 0, wire.encode(self._settings())))
        return self._scheduler.joined(now, worker)

    def _settings(self) -> WorkerSettings:
        """Settings with which a worker finds the functions of this process."""
        return {"path": list(sys.path), "main": main_script(), "allow": None}

    def _carry_out(self, commands: list[Command]) -> list[_Settled]:
        """Carry out commands. The caller settles the futures outside the lock, because callbacks may submit."""
        settled: list[_Settled] = []
        for command in commands:  # may grow during the loop
            match command:
                case Send(worker, ticket, task):
                    call = self._calls[task]
                    if call.future.running() or call.future.set_running_or_notify_cancel():
                        self._transport.send(worker, Message(Kind.TASK, ticket, call.frame))
                    else:  # cancelled in the meantime: for the scheduler it is done
                        commands += self._scheduler.received(time.monotonic(), worker, ticket, None, seconds=None)
                case Ship(worker, number):
                    shared = self._shared[number]
                    self._transport.send(worker, Message(Kind.SHARE, number, shared.frame))
                case Resolve(task, outcome):
                    call = self._calls.pop(task)
                    if isinstance(outcome, _Outcome):  # None for a task that was cancelled
                        error = None if outcome.failed is None else task_error(outcome.failed, call.label)
                        settled.append((call.future, outcome.result, error))
                case Fail(task, error):
                    settled.append((self._calls.pop(task).future, None, error))
                case GiveUp(worker):
                    self._transport.drop(worker)
                case Notice(text):
                    log.warning("%s", text)
        return settled

    def _forget(self) -> None:
        for number in self._shared.released():
            for worker in self._scheduler.forget(number):
                self._transport.send(worker, Message(Kind.FORGET, number))


def _hello(frame: Buffer) -> dict[str, str]:
    """Decode and check a worker's HELLO: its fingerprint."""
    body = wire.decode(frame)
    if type(body) is not dict or any(type(text) is not str for item in body.items() for text in item):
        raise WireError("a HELLO that is not a dict of strings")
    return body


_FIELDS: dict[int, dict[str, type]] = {  # to be checked, by kind of message
    Kind.DONE: {"seconds": float},
    Kind.FAILED: {"seconds": float, "type": str, "message": str, "traceback": str},
}


def _outcome(kind: int, frame: Buffer) -> _Outcome:
    """Decode and check a worker's DONE or FAILED."""
    body = wire.decode(frame)
    if kind not in _FIELDS or type(body) is not dict:
        raise WireError(f"a message of kind {kind} that holds a {type(body).__name__}")
    wrong = [name for name, expected in _FIELDS[kind].items() if type(body.get(name)) is not expected]
    if wrong:
        raise WireError(f"a {Kind(kind).name} without a valid {', '.join(wrong)}")
    if kind == Kind.FAILED:
        return _Outcome(body["seconds"], failed=cast("FailedBody", body))
    return _Outcome(body["seconds"], body.get("result"))


def _settle(settled: list[_Settled]) -> None:
    for future, result, error in settled:
        if error is None:
            future.set_result(result)
        elif future.running() or future.set_running_or_notify_cancel():
            future.set_exception(error)
