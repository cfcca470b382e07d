"""The redis engine: workers that join and leave at any time, on any machine that reaches the server.

Messages to a worker go through the inbox of its machine, messages from it arrive in the head's inbox. A shared value is
stored once on the server and fetched once by each machine. When the connection fails, or the head's record is gone
because the server was restarted or flushed, a new epoch begins: all workers count as gone, without fault, and join
again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import shoal
from shoal.engines.redis.address import Address, cannot_reach, find_server
from shoal.engines.redis.envelope import LARGEST, Header, Serials, Word, seal, unpack, unseal
from shoal.engines.redis.link import KEPT, TIMEOUT, Link, ServerLost, Write, is_refused
from shoal.engines.redis.records import LEASE, ORDERS, HeadRecord, Registry, head_inbox, machine_inbox, share_key
from shoal.engines.remote import Broken, Event, Heard, Left, Received, RemoteEngine
from shoal.engines.scheduler import Command, Scheduler
from shoal.engines.wire import Kind, Message
from shoal.errors import EngineError, UsageError, WireError, WorkerRefused

log = logging.getLogger("shoal.redis")

_REMIND_EVERY = 60.0  # seconds between reminders that workers are missing
_AT_ONCE = 256  # messages that are sent together


class RedisEngine(RemoteEngine):
    """Uses all workers that machines offer it, now and later. With `workers`, waits until that many have joined."""

    largest = LARGEST

    def __init__(
        self,
        workers: int | None = None,
        *,
        address: str | None = None,
        task_timeout: float | None = None,
        lease: float = LEASE,
        timeout: float = TIMEOUT,
        allow_mixed: bool = False,
    ) -> None:
        server = find_server(address)
        transport = RedisTransport(server, workers or 1, lease, timeout)
        scheduler = Scheduler(task_timeout=task_timeout, lease=lease, patience=float("inf"))
        self._enough = threading.Event()
        self._needed = workers or 1
        self._redis = transport
        super().__init__(transport, workers=self._needed, scheduler=scheduler, allow_mixed=allow_mixed)
        if workers is not None:
            self._wait()

    @property
    def pids(self) -> list[int]:
        """Process ids of its workers on this host, oldest first."""
        return self._redis.pids()

    def _wait(self) -> None:
        try:
            while not self._enough.wait(0.5):
                if self._broken is not None:
                    raise self._broken
        except BaseException:
            self.close()
            raise

    def _take(self, now: float, event: Event) -> list[Command]:
        commands = super()._take(now, event)
        joined = len(self._scheduler.workers)
        self.workers = max(joined, 1)
        self._redis.count(joined)
        if joined >= self._needed:
            self._enough.set()
        return commands


@dataclass(frozen=True, slots=True)
class _WorkerAddress:
    machine: str
    number: int


class RedisTransport:
    """Moves messages through lists on a Redis server.

    One lock guards the table of workers and the order of outgoing messages. The link's thread handles incoming
    messages; `shoal-redis` sends and renews the head's record.
    """

    def __init__(self, server: Address, need: int, lease: float, timeout: float) -> None:
        self._server, self._need, self._lease, self._timeout = server, need, lease, timeout
        self._beat = min(1.0, lease / 5)
        self._run = secrets.token_hex(8)
        self._epoch = 0
        self._order = 0
        self._have, self._started = 0, False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._addresses: dict[int, _WorkerAddress] = {}
        self._workers: dict[_WorkerAddress, int] = {}
        self._serials = itertools.count()
        self._seen = Serials(server.key)
        self._stored: set[int] = set()  # shared values that the server holds
        self._refused: set[str] = set()  # machines
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[tuple[int, Write] | None] = queue.SimpleQueue()  # with their epoch
        self._closed = threading.Event()
        self._outage = False  # the loss of the server has been logged
        self._renew_at = 0.0
        self._report_at = time.monotonic() + 0.5
        self._reported: tuple[int, int] | None = None
        self._remind_at = 0.0
        self._link = Link(server, timeout, self)
        self._check_server()
        self._thread = threading.Thread(target=self._live, name="shoal-redis", daemon=True)
        self._thread.start()

    def _check_server(self) -> None:
        """Connect at once, so that a wrong address or password is reported at once."""
        import redis

        try:
            self._link.connection.ping()
        except (redis.RedisError, OSError) as error:
            raise UsageError(cannot_reach(self._server, error)) from None

    # The thread that sends: one epoch after another -----------------------------------------------------------

    def _live(self) -> None:
        try:
            self._link.run()
            self._link.farewell(self._record(), self._last_writes())
        except EngineError as error:
            self._events.put(Broken(error))
        except Exception as error:
            log.exception("the connection to Redis failed; this is a bug in Shoal")
            self._events.put(Broken(EngineError(f"the connection to Redis failed: {error!r}")))
        finally:
            self._link.close()

    def begin(self) -> str:
        """Begin an epoch, and tell all machines that there is work."""
        with self._lock:
            self._epoch += 1
            self._stored.clear()
        if not self._order:
            self._order = int(self._link.connection.incr(ORDERS))
        self._link.registry.write(self._record(), new=True)
        for machine in self._link.registry.machines():
            self._put(machine.id, -1, Message(Word.LOOK, 0))
        self._outage = False
        return head_inbox(self._run, self._epoch)

    def exchange(self) -> None:
        """Send messages and renew the record until the engine is closed."""
        beat_at = time.monotonic() + self._beat
        while not self._closed.is_set():
            self._link.check()
            self._link.write(self._next_writes(beat_at - time.monotonic()))
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + self._beat
                if not self._link.registry.write(self._record(), new=False):
                    raise ServerLost("it was restarted or flushed")

    def _record(self) -> HeadRecord:
        return HeadRecord(
            self._run, self._epoch, self._order, self._need, self._started, self._have, self._lease,
            socket.gethostname(), os.getpid(), shoal.__version__,
        )  # fmt: skip

    def _next_writes(self, timeout: float) -> list[Write]:
        """Wait at most `timeout` seconds for writes of this epoch; add the renewal of shared values when it is due."""
        queued: list[tuple[int, Write] | None] = []
        with contextlib.suppress(queue.Empty):
            queued.append(self._out.get(timeout=max(timeout, 0.0)))
            while len(queued) < _AT_ONCE:
                queued.append(self._out.get_nowait())
        writes = [item[1] for item in queued if item is not None and item[0] == self._epoch]
        now = time.monotonic()
        if now >= self._renew_at:  # so the values of a killed head expire
            self._renew_at = now + KEPT / 4
            writes += [Write("renew", key) for key in self._stored_keys()]
        return writes

    def _stored_keys(self) -> list[str]:
        with self._lock:
            return [share_key(self._run, self._epoch, number) for number in self._stored]

    def _last_writes(self) -> list[Write]:
        """Tell the machines that their workers are free, and delete shared values."""
        with self._lock:
            machines = {address.machine for address in self._addresses.values()}
        look = Message(Word.LOOK, 0)
        writes = [Write("push", machine_inbox(machine), self._sealed(machine, -1, look)) for machine in machines]
        return writes + [Write("delete", key) for key in self._stored_keys()]

    def lost(self, error: Exception) -> None:
        """Count all workers as gone, without fault."""
        with self._lock:
            gone, self._addresses, self._workers = list(self._addresses), {}, {}
        for worker in gone:
            self._events.put(Left(worker, "was lost together with the Redis server", fault=False))
        if is_refused(error):
            raise EngineError(cannot_reach(self._server, error))
        if not self._outage and not self._closed.is_set():
            self._outage = True
            log.warning("lost Redis at %s (%s); reconnecting to send unfinished tasks again", self._server.url, error)

    def rest(self, seconds: float) -> bool:
        return not self._closed.wait(seconds)

    def interrupt(self) -> None:
        self._out.put(None)

    # The link's thread: incoming messages ---------------------------------------------------------------------

    def receive(self, contents: Sequence[bytes]) -> None:
        inbox = head_inbox(self._run, self._epoch)
        for content in contents:
            try:
                self._sort(inbox, content)
            except WireError as error:
                self._link.refusals.add(inbox, error)

    def _sort(self, inbox: str, content: bytes) -> None:
        header, frame = unseal(self._server.key, inbox, content, Header)
        if (header.run, header.epoch) != (self._run, self._epoch):
            raise WireError("a message belongs to another run or epoch")
        self._seen.check(header)
        if header.kind == Word.ALIVE:
            self._alive(header.machine, unpack(frame, list[int]))
            return
        worker = self._number(_WorkerAddress(header.machine, header.worker), joins=header.kind == Kind.HELLO)
        if worker is None:
            return
        if header.kind == Word.LEFT:
            reason, fault = unpack(frame, tuple[str, bool])
            self.drop(worker)  # so that both sides agree, even if the message was forged
            self._events.put(Left(worker, reason, fault))
        elif header.kind in (Kind.HELLO, Kind.DONE, Kind.FAILED):
            self._events.put(Received(worker, Message(header.kind, header.number, bytearray(frame))))
        else:
            raise WireError(f"a head does not accept messages of this kind: {header.kind}")

    def _number(self, address: _WorkerAddress, joins: bool) -> int | None:
        """Look up the number of a worker that sent a message; None if the message no longer matters.

        A worker that joins gets a number, but not twice. Others have one unless they were given up.
        """
        with self._lock:
            if not joins:
                return self._workers.get(address)
            if address in self._workers:
                return None
            worker = self._workers[address] = next(self._numbers)
            self._addresses[worker] = address
            return worker

    def _alive(self, machine: str, numbers: list[int]) -> None:
        """Note that workers are alive. Those that this head does not know are told to leave, and then join again."""
        for number in numbers:
            with self._lock:
                worker = self._workers.get(_WorkerAddress(machine, number))
            if worker is not None:
                self._events.put(Heard(worker))
            else:
                self._put(machine, number, Message(Word.LEAVE, 0))

    # The engine's thread --------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> Sequence[Event]:
        events: list[Event | None] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        self._report()
        return [event for event in events if event is not None]

    def count(self, joined: int) -> None:
        """Note how many workers the scheduler has now."""
        if joined >= self._need:
            self._started = True
        self._have = joined

    def _report(self) -> None:
        """Log the number of workers when it has changed, and how to start some when there are too few."""
        now = time.monotonic()
        if now < self._report_at:
            return
        self._report_at = now + 0.5
        with self._lock:
            counts = (len(self._addresses), len({address.machine for address in self._addresses.values()}))
        need = 1 if self._started else self._need
        if counts != self._reported and counts[0] == self._have:  # else the scheduler has not heard of all of them yet
            self._reported = counts
            self._remind_at = now
            if self._have >= need:
                log.info("%d worker(s) on %d machine(s)", *counts)
        if self._have < need and now >= self._remind_at:
            self._remind_at = now + _REMIND_EVERY
            log.warning(
                "waiting for workers (%d of %d connected). Start more on any machine: %s",
                self._have, need, worker_command(self._server),
            )  # fmt: skip

    def _remove(self, worker: int) -> _WorkerAddress | None:
        with self._lock:
            address = self._addresses.pop(worker, None)
            if address is not None:
                del self._workers[address]
            return address

    def drop(self, worker: int) -> None:
        address = self._remove(worker)
        if address is not None:
            self._put(address.machine, address.number, Message(Word.LEAVE, 0))

    def refuse(self, worker: int, error: WorkerRefused) -> Sequence[Event]:
        """Refuse only this machine: others have other installations."""
        address = self._remove(worker)
        if address is not None:
            self._put(address.machine, address.number, Message(Word.REFUSE, 0, str(error).encode()))
            if address.machine not in self._refused:
                self._refused.add(address.machine)
                log.warning("%s", error)
        return []

    # Any thread -----------------------------------------------------------------------------------------------

    def send(self, worker: int, message: Message) -> None:
        with self._lock:
            address = self._addresses.get(worker)
            if address is None:
                return
            new = message.kind == Kind.SHARE and message.number not in self._stored
            if new:
                self._stored.add(message.number)
            old = message.kind == Kind.FORGET and message.number in self._stored
            if old:
                self._stored.remove(message.number)
        key = share_key(self._run, self._epoch, message.number)
        if new:
            self._out.put((self._epoch, Write("set", key, seal(self._server.key, key, None, message.frame))))
        if message.kind == Kind.SHARE:
            message = Message(Kind.SHARE, message.number)  # the machine fetches the value, once
        self._put(address.machine, address.number, message)
        if old:
            self._out.put((self._epoch, Write("delete", key)))

    def _put(self, machine: str, number: int, message: Message) -> None:
        with self._lock:  # serial numbers are in the order of sending
            write = Write("push", machine_inbox(machine), self._sealed(machine, number, message))
            self._out.put((self._epoch, write))

    def _sealed(self, machine: str, number: int, message: Message) -> bytes:
        header = Header(self._run, self._epoch, machine, number, next(self._serials), message.kind, message.number)
        return seal(self._server.key, machine_inbox(machine), header, message.frame)

    def wake(self) -> None:
        self._events.put(None)

    def pids(self) -> list[int]:
        """Read the process ids of this run's workers on this host from the machines' records."""
        connection = self._server.open(self._timeout)
        try:
            machines = Registry(connection, self._server.key, self._link.refusals).machines()
        finally:
            connection.close()
        local = [machine for machine in machines if machine.host == socket.gethostname()]
        return [worker.pid for machine in local for worker in machine.workers if worker.run == self._run]

    def close(self) -> None:
        self._closed.set()
        self.interrupt()
        self._thread.join(2 * self._timeout)


def worker_command(server: Address) -> str:
    """Build the command that starts workers on a machine."""
    url = server.url
    if server.user == "head":  # the roles of `shoal redis start --acl`
        url = url.replace("://head@", "://worker@").replace("/head.password", "/worker.password")
    return shlex.join(["shoal", "worker", "--redis", url])
