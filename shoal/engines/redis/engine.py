"""The redis engine: workers that come and go, on any machine that reaches the server.

A worker is a process on some machine; what is said to it goes into that machine's list, what it says comes into the
head's. A shared value is stored once and fetched once by each machine. Two threads have a connection each: one waits
for messages, the other sends them and renews the head's record. When either fails, or the record is gone because the
server was restarted or flushed, a new epoch begins: all workers count as gone, without fault, and join again.
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
from typing import TYPE_CHECKING

import shoal
from shoal.engines.redis.address import Address, cannot_reach, find
from shoal.engines.redis.envelope import LARGEST, Header, Refusals, Serials, Word, seal, unpack, unseal
from shoal.engines.redis.link import KEPT, take
from shoal.engines.redis.records import LEASE, ORDERS, HeadRecord, Registry, head_inbox, machine_inbox, share_key
from shoal.engines.remote import Broken, Event, Heard, Left, Received, RemoteEngine
from shoal.engines.scheduler import Command, Scheduler
from shoal.engines.wire import Kind, Message
from shoal.errors import EngineError, UsageError, WireError, WorkerRefused

if TYPE_CHECKING:
    import redis

log = logging.getLogger("shoal.redis")

TIMEOUT = 5.0
"""Seconds without an answer from the server after which the connection is made anew."""
_REMIND_EVERY = 60.0  # seconds between words on missing workers
_BATCH = 256  # messages that are sent at once
_LONGEST_PAUSE = 2.0  # seconds between tries to reach the server


class RedisEngine(RemoteEngine):
    """Whatever workers are there, now and later. With `workers`, waits until there are at least so many."""

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
        server = find(address)
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
        """Process ids of its workers that run on this machine, oldest first."""
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
        here = len(self._scheduler.workers)
        self.workers = max(here, 1)
        self._redis.count(here)
        if here >= self._needed:
            self._enough.set()
        return commands


@dataclass(frozen=True, slots=True)
class _WorkerAddress:
    machine: str
    number: int


class RedisTransport:
    """One lock guards who is here and what is to be sent; each thread has a connection of its own."""

    def __init__(self, server: Address, need: int, lease: float, timeout: float) -> None:
        self._server, self._need, self._lease, self._timeout = server, need, lease, timeout
        self._beat = min(1.0, lease / 5)
        self._run = secrets.token_hex(8)
        self._epoch = 0
        self._order = 0
        self._have, self._started = 0, False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._members: dict[int, _WorkerAddress] = {}
        self._workers: dict[_WorkerAddress, int] = {}
        self._serials = itertools.count()
        self._seen = Serials(server.key)
        self._stored: set[int] = set()  # shared values that the server holds
        self._refusals = Refusals()
        self._refused: set[str] = set()  # machines
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[tuple[int, str, str, bytes]] = queue.SimpleQueue()  # epoch, command, key, content
        self._failed = threading.Event()  # this epoch is over
        self._closed = threading.Event()
        self._remind_at = time.monotonic() + 0.5
        self._trouble = ""
        self._short_at = 0.0
        self._renew_at = 0.0
        self._said: tuple[int, int] | None = None
        self._first_link = self._first()
        self._threads = [threading.Thread(target=self._live, name="shoal-redis", daemon=True)]
        self._threads[0].start()

    # One epoch after the other --------------------------------------------------------------------------------

    def _first(self) -> redis.Redis:
        """The first connection is made at once, so that a wrong address or password is said at once."""
        link = self._server.open(self._timeout)
        import redis

        try:
            link.ping()
        except (redis.RedisError, OSError) as error:
            raise UsageError(cannot_reach(self._server, error)) from None
        return link

    def _live(self) -> None:
        import redis

        pause, link = 0.0, self._first_link
        while not self._closed.wait(pause):
            try:
                self._begin(link)
                pause = 0.1
                self._listen(link)
            except (redis.exceptions.NoPermissionError, redis.AuthenticationError) as error:
                self._events.put(Broken(EngineError(cannot_reach(self._server, error))))
                return
            except (redis.RedisError, OSError) as error:
                if pause <= 0.1 and not self._closed.is_set():
                    log.warning("Redis at %s was lost (%s); trying again", self._server.url, error)
                pause = min(max(2 * pause, 0.1), _LONGEST_PAUSE)
            except _Forgotten:
                log.warning("Redis at %s was lost (%s); everything is sent again", self._server.url, self._trouble)
            except Exception as error:
                log.exception("the thread that listens to Redis failed; this is a bug in Shoal")
                self._events.put(Broken(EngineError(f"the thread that listens to Redis failed: {error!r}")))
                return
            finally:
                self._failed.set()
                link.close()
                self._dismiss("was lost together with the Redis server")
            for thread in self._threads[1:]:
                thread.join()
            del self._threads[1:]
            link = self._server.open(self._timeout)
        link.close()

    def _begin(self, link: redis.Redis) -> None:
        with self._lock:
            self._epoch += 1
            self._stored.clear()
            self._failed = threading.Event()
        registry = Registry(link, self._server.key, self._refusals)
        if not self._order:
            self._order = int(link.incr(ORDERS))
        registry.write(self._record(), new=True)
        for machine in registry.machines():
            self._put(machine_inbox(machine.id), machine.id, -1, Message(Word.LOOK, 0))
        thread = threading.Thread(
            target=self._speak, args=(self._epoch, self._failed), name="shoal-redis-out", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _record(self) -> HeadRecord:
        return HeadRecord(
            self._run, self._epoch, self._order, self._need, self._started, self._have, self._lease,
            socket.gethostname(), os.getpid(), shoal.__version__,
        )  # fmt: skip

    def _dismiss(self, reason: str) -> None:
        with self._lock:
            gone, self._members, self._workers = list(self._members), {}, {}
        for worker in gone:
            self._events.put(Left(worker, reason, fault=False))

    def _listen(self, link: redis.Redis) -> None:
        name = head_inbox(self._run, self._epoch)
        while not self._closed.is_set():
            found = take(link, name, min(1.0, self._timeout / 2))
            if self._closed.is_set():
                return
            if self._failed.is_set():
                raise _Forgotten
            for content in found:
                try:
                    self._sort(name, content)
                except WireError as error:
                    self._refusals.add(name, error)

    def _speak(self, epoch: int, failed: threading.Event) -> None:
        """Send what is to be sent, and renew the record, until the epoch is over."""
        import redis

        link = self._server.open(self._timeout)
        registry = Registry(link, self._server.key, self._refusals)
        beat_at = time.monotonic() + self._beat
        try:
            while not failed.is_set() and not self._closed.is_set():
                self._write(link, [item for item in self._batch(beat_at - time.monotonic()) if item[0] == epoch])
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._beat
                    if not registry.write(self._record(), new=False):
                        self._trouble = "it does not have what it was given"
                        break
            if self._closed.is_set():
                self._farewell(link, registry, epoch)
        except (redis.RedisError, OSError) as error:
            self._trouble = str(error)  # the thread that listens says it
        finally:
            failed.set()
            link.close()

    def _write(self, link: redis.Redis, batch: list[tuple[int, str, str, bytes]]) -> None:
        pipe = link.pipeline(transaction=False)
        for _, command, name, content in batch:
            if command == "push":
                pipe.rpush(name, content)
                pipe.pexpire(name, KEPT)
            elif command == "set":
                pipe.set(name, content, px=KEPT)
            else:
                pipe.delete(name)
        now = time.monotonic()
        if now >= self._renew_at:  # a killed head's values go away by themselves
            self._renew_at = now + KEPT / 4000
            with self._lock:
                for number in self._stored:
                    pipe.pexpire(share_key(self._run, self._epoch, number), KEPT)
        if len(pipe):
            pipe.execute()

    def _batch(self, timeout: float) -> list[tuple[int, str, str, bytes]]:
        batch: list[tuple[int, str, str, bytes]] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._out.get(timeout=max(timeout, 0.0)))
            while len(batch) < _BATCH:
                batch.append(self._out.get_nowait())
        return batch

    def _farewell(self, link: redis.Redis, registry: Registry, epoch: int) -> None:
        registry.remove(self._record())
        with self._lock:
            names = [share_key(self._run, epoch, number) for number in self._stored]
            machines = {member.machine for member in self._members.values()}
        for machine in machines:
            link.rpush(machine_inbox(machine), self._sealed(machine, -1, Message(Word.LOOK, 0)))
        inbox = head_inbox(self._run, epoch)
        link.rpush(inbox, b"")  # or the thread that listens would go on for a second
        link.delete(*[inbox, *names])

    # Messages that come ---------------------------------------------------------------------------------------

    def _sort(self, name: str, content: bytes) -> None:
        header, frame = unseal(self._server.key, name, content, Header)
        if (header.run, header.epoch) != (self._run, self._epoch):
            raise WireError("a message is of another run or epoch")
        self._seen.check(header)
        member = _WorkerAddress(header.machine, header.worker)
        if header.kind == Word.ALIVE:
            self._alive(header.machine, unpack(frame, list[int]))
            return
        if header.kind == Kind.HELLO:
            with self._lock:
                if member in self._workers:
                    return
                worker = self._workers[member] = next(self._numbers)
                self._members[worker] = member
        else:
            with self._lock:
                known = self._workers.get(member)
            if known is None:
                return  # of a worker that was given up
            worker = known
        if header.kind == Word.LEFT:
            reason, fault = unpack(frame, tuple[str, bool])
            self.drop(worker)  # so that both sides agree, whoever said it
            self._events.put(Left(worker, reason, fault))
        elif header.kind in (Kind.HELLO, Kind.DONE, Kind.FAILED):
            self._events.put(Received(worker, Message(header.kind, header.number, bytearray(frame))))
        else:
            raise WireError(f"a head got a message that is not for heads: kind {header.kind}")

    def _alive(self, machine: str, numbers: list[int]) -> None:
        """Workers are alive. Those that this head knows nothing of are told to begin anew."""
        for number in numbers:
            with self._lock:
                worker = self._workers.get(_WorkerAddress(machine, number))
            if worker is not None:
                self._events.put(Heard(worker))
            else:
                self._put(machine_inbox(machine), machine, number, Message(Word.LEAVE, 0))

    def _remove(self, worker: int) -> _WorkerAddress | None:
        with self._lock:
            member = self._members.pop(worker, None)
            if member is not None:
                del self._workers[member]
            return member

    # The pump thread ------------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> Sequence[Event]:
        events: list[Event | None] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        self._remind()
        return [event for event in events if event is not None]

    def count(self, here: int) -> None:
        """How many workers the scheduler has now."""
        if here >= self._need:
            self._started = True
        self._have = here

    def _remind(self) -> None:
        """Say how many workers there are when that has changed, and how to get some when there are too few."""
        now = time.monotonic()
        if now < self._remind_at:
            return
        with self._lock:
            here = (len(self._members), len({member.machine for member in self._members.values()}))
        short = self._have < 1 if self._started else self._have < self._need
        self._remind_at = now + 0.5
        if here != self._said:
            self._said = here
            self._short_at = now
            if not short:
                log.info("%d worker(s) on %d machine(s)", *here)
        if short and now >= self._short_at:
            self._short_at = now + _REMIND_EVERY
            log.warning(
                "waiting for workers: %d of %d are here. On each machine that shall work, type: %s",
                self._have, 1 if self._started else self._need, worker_command(self._server),
            )  # fmt: skip

    def drop(self, worker: int) -> None:
        member = self._remove(worker)
        if member is not None:
            self._put(machine_inbox(member.machine), member.machine, member.number, Message(Word.LEAVE, 0))

    def refuse(self, worker: int, error: WorkerRefused) -> Sequence[Event]:
        """Only this machine has to go: the others are of other installs."""
        member = self._remove(worker)
        if member is not None:
            message = Message(Word.REFUSE, 0, str(error).encode())
            self._put(machine_inbox(member.machine), member.machine, member.number, message)
            if member.machine not in self._refused:
                self._refused.add(member.machine)
                log.warning("%s", error)
        return []

    # Any thread -----------------------------------------------------------------------------------------------

    def send(self, worker: int, message: Message) -> None:
        with self._lock:
            member = self._members.get(worker)
            if member is None:
                return
            new = message.kind == Kind.SHARE and message.number not in self._stored
            if new:
                self._stored.add(message.number)
            old = message.kind == Kind.FORGET and message.number in self._stored
            if old:
                self._stored.remove(message.number)
        name = share_key(self._run, self._epoch, message.number)
        if new:
            self._out.put((self._epoch, "set", name, seal(self._server.key, name, None, message.frame)))
        if message.kind == Kind.SHARE:
            message = Message(Kind.SHARE, message.number)  # the machine fetches it, once
        self._put(machine_inbox(member.machine), member.machine, member.number, message)
        if old:
            self._out.put((self._epoch, "delete", name, b""))

    def _put(self, name: str, machine: str, number: int, message: Message) -> None:
        with self._lock:  # serial numbers are in the order of sending
            self._out.put((self._epoch, "push", name, self._sealed(machine, number, message)))

    def _sealed(self, machine: str, number: int, message: Message) -> bytes:
        header = Header(self._run, self._epoch, machine, number, next(self._serials), message.kind, message.number)
        return seal(self._server.key, machine_inbox(machine), header, message.frame)

    def wake(self) -> None:
        self._events.put(None)

    def pids(self) -> list[int]:
        """Of the workers that run on this machine, from their machines' records."""
        link = self._server.open(self._timeout)
        try:
            machines = Registry(link, self._server.key, self._refusals).machines()
        finally:
            link.close()
        mine = [machine for machine in machines if machine.host == socket.gethostname()]
        return [worker.pid for machine in mine for worker in machine.workers if worker.run == self._run]

    def close(self) -> None:
        self._closed.set()
        self._out.put((0, "", "", b""))
        for thread in reversed(self._threads.copy()):
            thread.join(2 * self._timeout)


class _Forgotten(Exception):
    """The server does not have what it was given."""


def worker_command(server: Address) -> str:
    """What to type on a machine that shall work."""
    url = server.url
    if server.user == "head":  # the roles of `shoal redis start --acl`
        url = url.replace("://head@", "://worker@").replace("/head.password", "/worker.password")
    return shlex.join(["shoal", "worker", "--redis", url])
