"""`shoal worker`: one process for each machine, which has the workers as children and relays what is said.

It has one connection to listen and one to speak, however many workers there are, and fetches each shared value once.
It is another process than those that work, so a long call into C never looks like death. A worker serves one run: when
that ends, or another run needs it, a fresh process takes its place, and nothing of the old run is left in it.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

import shoal
from shoal.base.lifetime import die_with_parent
from shoal.engines import wire
from shoal.engines.functions import MAIN, Functions
from shoal.engines.processes import ProcessTransport
from shoal.engines.redis.address import Address, cannot_reach
from shoal.engines.redis.assignment import assign
from shoal.engines.redis.envelope import LARGEST, Header, Refusals, Serials, Word, seal, unseal
from shoal.engines.redis.link import KEPT, take
from shoal.engines.redis.records import (
    HeadRecord,
    MachineRecord,
    Registry,
    WorkerRecord,
    head_inbox,
    machine_inbox,
    share_key,
)
from shoal.engines.remote import Broken, Event, Heard, Left, Received
from shoal.engines.wire import Kind, Message
from shoal.engines.worker import describe
from shoal.errors import UsageError, WireError

if TYPE_CHECKING:
    import redis

log = logging.getLogger("shoal.worker")

PARENT = "SHOAL_PARENT"
"""Variable with the process that a machine ends with; none unless it is set."""
_BEAT = 1.0  # seconds between renewals of the record and looks at the runs, at most
_LONGEST_PAUSE = 2.0  # seconds between tries to reach the server
_SPEED_OVER = 10.0  # seconds


@dataclass(slots=True)
class _Child:
    number: int
    hello: bytes | bytearray | memoryview
    run: str = ""
    epoch: int = 0
    tasks: int = 0
    holds: set[tuple[str, int, int]] = field(default_factory=set)


class _ServerLost(Exception):
    """The connection is of no use any more, or the server forgot us; the message says which."""


class Supervisor:
    """Keeps `count` workers, for whatever runs there are. `allow` is the modules whose functions they may run."""

    def __init__(
        self, server: Address, count: int, allow: Collection[str], timeout: float, processes: Any = None
    ) -> None:
        self.id = secrets.token_hex(8)
        self._server, self._count, self._timeout = server, count, timeout
        self._allow = tuple(dict.fromkeys(allow))
        self._functions = Functions(self._allow)
        self._processes = ProcessTransport(count, {}) if processes is None else processes
        self._children: dict[int, _Child] = {}  # those that are ready
        self._shares: dict[tuple[str, int, int], tuple[memoryview, set[int]]] = {}
        self._gone: list[tuple[_Child, str, bool]] = []  # of whom their head has not been told
        self._incoming: queue.SimpleQueue[bytes | _ServerLost] = queue.SimpleQueue()
        self._out: list[tuple[str, bytes]] = []
        self._serials = iter(range(2**62))
        self._seen = Serials(server.key)
        self._refusals = Refusals()
        self._refused_by: dict[str, str] = {}
        self._runs: dict[str, HeadRecord] = {}
        self._beats = 0
        self._been_there = False
        self._look_at = 0.0
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._done = 0
        self._said = ""

    def serve(self) -> NoReturn:
        """Work until a signal, which raises."""
        if PARENT in os.environ:
            die_with_parent(int(os.environ[PARENT]))
        try:
            pause = 0.0
            while True:
                try:
                    self._sitting()
                except _ServerLost as error:
                    self._say(f"Redis at {self._server.url} was lost ({error}); trying again")
                    self._release_all("lost its way to the head")
                    pause = 0.1 if self._beats else min(max(2 * pause, 0.1), _LONGEST_PAUSE)
                self._rest(pause)
        finally:
            self._processes.close()

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.info("%s", text)

    def _rest(self, seconds: float) -> None:
        """Wait, and meanwhile keep the workers going."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._take_all(self._processes.poll(left))

    # One connection -------------------------------------------------------------------------------------------

    def _sitting(self) -> None:
        """From a connection to its end."""
        import redis

        self._beats = 0
        stop = threading.Event()
        link, ears = self._server.open(self._timeout), self._server.open(self._timeout)
        self._incoming = queue.SimpleQueue()
        listener = threading.Thread(target=self._listen, args=(ears, self._incoming, stop), daemon=True)
        try:
            registry = Registry(link, self._server.key, self._refusals)
            self._look_at = 0.0
            link.ping()
            listener.start()
            while True:
                now = time.monotonic()
                if now >= self._look_at:
                    self._look(registry)
                    self._look_at = now + self._beat()
                self._speak(link)
                self._take_all(self._processes.poll(max(self._look_at - time.monotonic(), 0.0)))
                while not self._incoming.empty():
                    self._hear(link, self._incoming.get())
                self._speak(link)
        except (redis.RedisError, OSError) as error:
            barred = isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError)
            if barred and not self._been_there:
                raise UsageError(cannot_reach(self._server, error)) from None
            raise _ServerLost(str(error)) from None
        finally:
            stop.set()
            self._leave(link)
            if listener.is_alive():
                listener.join(2 * self._timeout)
            ears.close()

    def _leave(self, link: redis.Redis) -> None:
        """Where this ends on purpose and the server is there: do not keep anybody waiting."""
        import redis

        link.close()
        if isinstance(sys.exc_info()[1], Exception) or not self._beats:
            return
        link = self._server.open(self._timeout)  # a signal may have come in the middle of a command of the other
        try:
            self._release_all("was ended")
            self._speak(link)
            Registry(link, self._server.key, self._refusals).remove(self._record())
        except (redis.RedisError, OSError) as error:
            log.warning("the server could not be told: %s", error)
        finally:
            link.close()

    def _listen(self, link: redis.Redis, into: queue.SimpleQueue[bytes | _ServerLost], stop: threading.Event) -> None:
        import redis

        try:
            while not stop.is_set():
                found = take(link, machine_inbox(self.id), min(1.0, self._timeout / 2))
                for content in found:
                    into.put(content)
                if found:
                    self._processes.wake()
        except (redis.RedisError, OSError) as error:
            into.put(_ServerLost(str(error)))
            if not stop.is_set():
                self._processes.wake()

    def _beat(self) -> float:
        return min([_BEAT, *(run.lease / 5 for run in self._runs.values())])

    def _speak(self, link: redis.Redis) -> None:
        for child, reason, fault in self._gone:
            frame = msgspec.msgpack.encode((reason, fault))
            self._tell(child.run, child.epoch, child.number, Message(Word.LEFT, 0, frame))
        self._gone.clear()
        if not self._out:
            return
        pipe = link.pipeline(transaction=False)
        for name, content in self._out:
            pipe.rpush(name, content)
            pipe.pexpire(name, KEPT)
        self._out.clear()
        pipe.execute()

    def _tell(self, run: str, epoch: int, number: int, message: Message) -> None:
        name = head_inbox(run, epoch)
        header = Header(run, epoch, self.id, number, next(self._serials), message.kind, message.number)
        self._out.append((name, seal(self._server.key, name, header, message.frame)))

    # Who works for whom ---------------------------------------------------------------------------------------

    def _look(self, registry: Registry) -> None:
        """Renew the record, see which runs there are, and act on what is this machine's part."""
        if not registry.write(self._record(), new=not self._beats):
            raise _ServerLost("it has lost what it held")
        self._beats += 1
        self._been_there = True
        self._runs = {run.id: run for run in registry.heads()}
        self._refused_by = {run: why for run, why in self._refused_by.items() if run in self._runs}
        others = [machine for machine in registry.machines() if machine.id != self.id]
        for child in list(self._children.values()):
            if child.run and (child.run not in self._runs or self._runs[child.run].epoch != child.epoch):
                self._release(child)  # its head is gone, or knows nothing of it
        wanted = assign(list(self._runs.values()), [*others, self._record()])
        changed = False
        for child in list(self._children.values()):
            run = wanted.get((self.id, child.number), "")
            if run != child.run:
                changed = True
                if child.run:
                    self._gone.append((child, "went to another run", False))
                    self._release(child)
                else:
                    self._attach(child, self._runs[run])
        if changed:
            registry.write(self._record(), new=False)
        self._report()

    def _report(self) -> None:
        busy = [child.run for child in self._children.values() if child.run]
        names = sorted({f"{self._runs[run].host}, pid {self._runs[run].pid}" for run in busy if run in self._runs})
        if names:
            self._say(f"{len(busy)} of {self._count} worker(s) at work for {'; '.join(names)}")
        else:
            self._say(f"{self._count} worker(s) at {self._server.url} wait for a run")

    def _attach(self, child: _Child, run: HeadRecord) -> None:
        child.run, child.epoch = run.id, run.epoch
        self._tell(run.id, run.epoch, child.number, Message(Kind.HELLO, 0, child.hello))

    def _release(self, child: _Child) -> None:
        """End a worker; a fresh one takes its place."""
        self._forget_child(child)
        self._processes.drop(child.number)

    def _release_all(self, reason: str) -> None:
        for child in list(self._children.values()):
            if child.run:
                self._gone.append((child, reason, False))
                self._release(child)

    def _forget_child(self, child: _Child) -> None:
        self._children.pop(child.number, None)
        for key in child.holds:
            self._let_go(key, child.number)

    def _let_go(self, key: tuple[str, int, int], number: int) -> None:
        """A worker does not hold a shared value any more; the last one takes this machine's copy along."""
        if key in self._shares:
            holders = self._shares[key][1]
            holders.discard(number)
            if not holders:
                del self._shares[key]

    def _record(self) -> MachineRecord:
        now = time.monotonic()
        self._marks.append((now, self._done))
        while now - self._marks[0][0] > _SPEED_OVER and len(self._marks) > 2:
            self._marks.popleft()
        since, before = self._marks[0]
        pids = self._processes.numbered_pids()
        workers = [WorkerRecord(c.number, pids.get(c.number, 0), c.run, c.tasks) for c in self._children.values()]
        return MachineRecord(
            self.id, socket.gethostname(), os.getpid(), shoal.__version__, workers, self._count - len(workers),
            (self._done - before) / max(now - since, 1e-3), self._refused_by, self._refusals.count,
        )  # fmt: skip

    # From workers to heads ------------------------------------------------------------------------------------

    def _take_all(self, events: Collection[Event]) -> None:
        alive: dict[tuple[str, int], list[int]] = {}
        for event in events:
            if isinstance(event, Broken):
                raise event.error
            child = self._children.get(event.worker)
            if isinstance(event, Received):
                self._from_worker(event.worker, child, event.message)
            elif child is None:
                continue
            elif isinstance(event, Heard) and child.run:
                alive.setdefault((child.run, child.epoch), []).append(child.number)
            elif isinstance(event, Left):
                self._forget_child(child)
                if child.run:
                    self._gone.append((child, event.reason, True))
        for (run, epoch), numbers in alive.items():
            self._tell(run, epoch, -1, Message(Word.ALIVE, 0, msgspec.msgpack.encode(numbers)))

    def _from_worker(self, number: int, child: _Child | None, message: Message) -> None:
        if message.kind == Kind.HELLO:
            self._children[number] = _Child(number, message.frame)
            self._processes.send(number, self._welcome(None))
            self._look_at = 0.0
        elif child is not None and child.run:
            child.tasks += 1
            self._done += 1
            if len(message.frame) > LARGEST:
                error = WireError(f"a result has {len(message.frame):,} bytes; Redis takes at most {LARGEST:,}")
                message = failed(message.number, error)
            self._tell(child.run, child.epoch, number, message)

    def _welcome(self, main: str | None) -> Message:
        """What a worker may do is for this machine to say, not for the head."""
        settings = {"path": list(sys.path), "main": main if MAIN in self._allow else None, "allow": list(self._allow)}
        return Message(Kind.WELCOME, 0, wire.encode(settings))

    # From heads to workers ------------------------------------------------------------------------------------

    def _hear(self, link: redis.Redis, content: bytes | _ServerLost) -> None:
        if isinstance(content, _ServerLost):
            raise content
        try:
            header, frame = unseal(self._server.key, machine_inbox(self.id), content, Header)
            if header.machine != self.id:
                raise WireError("a message is for another machine")
            self._seen.check(header)
            if header.kind == Word.LOOK:
                self._look_at = 0.0
                return
            child = self._children.get(header.worker)
            if child is None or (child.run, child.epoch) != (header.run, header.epoch):
                return  # of an epoch that is over, or for a worker that is gone
            self._to_worker(link, child, header, frame)
        except WireError as error:
            self._refusals.add(machine_inbox(self.id), error)

    def _to_worker(self, link: redis.Redis, child: _Child, header: Header, frame: memoryview) -> None:
        key = (header.run, header.epoch, header.number)
        if header.kind == Kind.TASK:
            self._give(child, header.number, frame)
        elif header.kind == Kind.SHARE:
            value = self._fetch(link, key)
            if value is None:
                self._gone.append((child, "could not get a shared value: the server has lost it", False))
                self._release(child)
                return
            self._shares[key][1].add(child.number)
            child.holds.add(key)
            self._processes.send(child.number, Message(Kind.SHARE, header.number, value))
        elif header.kind == Kind.FORGET:
            child.holds.discard(key)
            self._let_go(key, child.number)
            self._processes.send(child.number, Message(Kind.FORGET, header.number))
        elif header.kind == Kind.WELCOME:
            self._processes.send(child.number, self._welcome(_main_of(frame)))
        elif header.kind == Word.LEAVE:
            self._release(child)
        elif header.kind == Word.REFUSE:
            self._refused_by[child.run] = bytes(frame[:2000]).decode(errors="replace")
            log.warning("a run refused this machine: %s", self._refused_by[child.run])
            child.run = ""
            self._look_at = 0.0
        else:
            raise WireError(f"a machine got a message that is not for machines: kind {header.kind}")

    def _give(self, child: _Child, ticket: int, frame: memoryview) -> None:
        """Pass a task on, if it is one that workers of this machine may run."""
        try:
            match wire.decode(frame, _Anything()):
                case (str(name), [*_]):
                    self._functions.permit(name)
                case _:
                    raise WireError("a task is not a name and a list of arguments")
        except UsageError as error:
            self._refusals.add(machine_inbox(self.id), WireError(str(error)))
            self._tell(child.run, child.epoch, child.number, failed(ticket, error))
            return
        self._processes.send(child.number, Message(Kind.TASK, ticket, frame))

    def _fetch(self, link: redis.Redis, key: tuple[str, int, int]) -> memoryview | None:
        """A shared value, from the server the first time. What is not one is refused here, not in every worker."""
        if key not in self._shares:
            name = share_key(*key)
            content: Any = link.get(name)
            if content is None:
                return None
            _, frame = unseal(self._server.key, name, content, type(None))
            wire.decode(frame)
            self._shares[key] = (frame, set())
        return self._shares[key][0]


class _Anything(Mapping[int, None]):
    """Stands for shared values where only the shape of a message matters."""

    def __getitem__(self, number: int) -> None:
        return None

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def failed(ticket: int, error: Exception) -> Message:
    """The answer to a task that was not even tried."""
    return Message(Kind.FAILED, ticket, wire.encode({"seconds": 0.0, **describe(error)}))


def _main_of(frame: memoryview) -> str | None:
    settings = wire.decode(frame)
    main = settings.get("main") if type(settings) is dict else None
    return main if type(main) is str else None
