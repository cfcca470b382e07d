"""The process of `shoal worker`: runs the worker processes of a machine and relays their messages.

However many workers there are, the supervisor has two connections and fetches each shared value once. It is a separate
process, so a worker in a long call into C never looks dead. A worker serves one run: when that run ends, or another run
needs the worker, a fresh process takes its place, and nothing of the old run is left in it.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import msgspec

import shoal
from shoal.base.lifetime import die_with_parent
from shoal.engines import wire
from shoal.engines.functions import Functions
from shoal.engines.processes import ProcessTransport
from shoal.engines.redis.address import Address, cannot_reach
from shoal.engines.redis.assignment import assign
from shoal.engines.redis.envelope import LARGEST, Header, Serials, Word, seal, unseal
from shoal.engines.redis.link import Link, ServerLost, Write, is_refused
from shoal.engines.redis.records import HeadRecord, MachineRecord, WorkerRecord, head_inbox, machine_inbox, share_key
from shoal.engines.remote import Broken, Event, Heard, Left, Received
from shoal.engines.user_code import MAIN
from shoal.engines.wire import Kind, Message
from shoal.engines.worker import describe_error
from shoal.errors import Stopped, UsageError, WireError

log = logging.getLogger("shoal.worker")

PARENT = "SHOAL_PARENT"
"""Environment variable: id of the process that the supervisor ends with (default: none)."""
_BEAT = 1.0  # longest time in seconds between renewals of the record
_SPEED_OVER = 10.0  # seconds over which the speed is averaged

_ShareKey = tuple[str, int, int]  # run, epoch, number


class WorkerProcesses(Protocol):
    """The part of `ProcessTransport` that a supervisor uses."""

    def poll(self, timeout: float) -> Sequence[Event]: ...

    def send(self, worker: int, message: Message) -> None: ...

    def wake(self) -> None: ...

    def drop(self, worker: int) -> None: ...

    def numbered_pids(self) -> dict[int, int]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Worker:
    """A worker process that is ready."""

    number: int
    hello: bytes | bytearray | memoryview
    run: str = ""  # empty while it waits
    epoch: int = 0
    tasks: int = 0
    holds: set[_ShareKey] = field(default_factory=set)


@dataclass(slots=True)
class _Share:
    """A shared value, and the numbers of the workers that hold it."""

    frame: memoryview
    holders: set[int] = field(default_factory=set)


class Supervisor:
    """Offers `count` workers to all runs on a server. Workers may run functions of the modules in `allow`."""

    def __init__(
        self,
        server: Address,
        count: int,
        allow: Collection[str],
        timeout: float,
        processes: WorkerProcesses | None = None,
    ) -> None:
        self.id = secrets.token_hex(8)
        self._server, self._count = server, count
        self._allow = tuple(dict.fromkeys(allow))
        self._functions = Functions(self._allow)
        self._processes = ProcessTransport(count, {}) if processes is None else processes
        self._workers: dict[int, _Worker] = {}
        self._shares: dict[_ShareKey, _Share] = {}
        self._inbox = machine_inbox(self.id)
        self._incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._out: list[Write] = []
        self._serials = itertools.count()
        self._seen = Serials(server.key)
        self._refused_by: dict[str, str] = {}
        self._heads: dict[str, HeadRecord] = {}
        self._registered = False  # at least once
        self._look_at = 0.0
        self._done = 0
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # times, and tasks done by then
        self._logged = ""
        self._link = Link(server, timeout, self)

    def serve(self) -> NoReturn:
        """Work until a signal, which raises."""
        if PARENT in os.environ:
            die_with_parent(int(os.environ[PARENT]))
        try:
            self._link.run()
            raise AssertionError("unreachable: only an exception ends the loop")
        except (Stopped, KeyboardInterrupt):  # heads must not wait for the lease to expire
            self._release_all("was ended")
            self._link.farewell(self._record(), self._out)
            raise
        finally:
            self._link.close()
            self._processes.close()

    def _log_change(self, text: str) -> None:
        if text != self._logged:
            self._logged = text
            log.info("%s", text)

    # One session after another --------------------------------------------------------------------------------

    def begin(self) -> str:
        self._incoming = queue.SimpleQueue()
        self._look_at = 0.0
        self._link.registry.write(self._record(), new=True)
        self._registered = True
        return self._inbox

    def exchange(self) -> NoReturn:
        """Relay messages, and follow the assignment, until the server is lost."""
        while True:
            self._link.check()
            now = time.monotonic()
            if now >= self._look_at:
                self._look()
                self._look_at = now + min([_BEAT, *(head.lease / 5 for head in self._heads.values())])
            self._send()
            self._take_all(self._processes.poll(max(self._look_at - time.monotonic(), 0.0)))
            while not self._incoming.empty():
                self._sort(self._incoming.get())
            self._send()

    def receive(self, contents: Sequence[bytes]) -> None:
        for content in contents:
            self._incoming.put(content)
        self._processes.wake()

    def interrupt(self) -> None:
        self._processes.wake()

    def lost(self, error: Exception) -> None:
        """Replace the workers of all runs: their heads count them as gone."""
        if is_refused(error) and not self._registered:
            raise UsageError(cannot_reach(self._server, error))
        what = "lost" if self._registered else "cannot reach"
        self._log_change(f"{what} Redis at {self._server.url} ({error}); trying again")
        self._release_all("lost its connection to the head")

    def rest(self, seconds: float) -> bool:
        """Keep the workers going while waiting."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._take_all(self._processes.poll(left))
        return True

    def _send(self) -> None:
        if self._out:
            writes, self._out = self._out, []
            self._link.write(writes)

    def _tell(self, run: str, epoch: int, number: int, message: Message) -> None:
        key = head_inbox(run, epoch)
        header = Header(run, epoch, self.id, number, next(self._serials), message.kind, message.number)
        self._out.append(Write("push", key, seal(self._server.key, key, header, message.frame)))

    def _tell_left(self, worker: _Worker, reason: str, fault: bool) -> None:
        frame = msgspec.msgpack.encode((reason, fault))
        self._tell(worker.run, worker.epoch, worker.number, Message(Word.LEFT, 0, frame))

    # Which worker works for which run -------------------------------------------------------------------------

    def _look(self) -> None:
        """Renew the record, read the others' records, and carry out this machine's part of the assignment."""
        registry = self._link.registry
        if not registry.write(self._record(), new=False):
            raise ServerLost("it was restarted or flushed")
        self._heads = {head.id: head for head in registry.heads()}
        self._refused_by = {run: why for run, why in self._refused_by.items() if run in self._heads}
        others = [machine for machine in registry.machines() if machine.id != self.id]
        for worker in list(self._workers.values()):
            if worker.run and (worker.run not in self._heads or self._heads[worker.run].epoch != worker.epoch):
                self._replace(worker)  # its head has ended, or has begun another epoch
        wanted = assign(list(self._heads.values()), [*others, self._record()])
        if self._reassign(wanted):
            registry.write(self._record(), new=False)
        self._report()

    def _reassign(self, wanted: Mapping[tuple[str, int], str]) -> bool:
        """Move workers to other runs; False if all were in place."""
        moved = False
        for worker in list(self._workers.values()):
            run = wanted.get((self.id, worker.number), "")
            if run == worker.run:
                continue
            moved = True
            if worker.run:
                self._tell_left(worker, "went to another run", fault=False)
                self._replace(worker)
            else:
                worker.run, worker.epoch = run, self._heads[run].epoch
                self._tell(run, worker.epoch, worker.number, Message(Kind.HELLO, 0, worker.hello))
        return moved

    def _report(self) -> None:
        busy = [worker.run for worker in self._workers.values() if worker.run]
        heads = [self._heads[run] for run in busy if run in self._heads]
        if heads:
            names = sorted({f"{head.host}, pid {head.pid}" for head in heads})
            self._log_change(f"{len(busy)} of {self._count} worker(s) working for {'; '.join(names)}")
        else:
            self._log_change(f"{self._count} worker(s) at {self._server.url}, waiting for a run")

    def _replace(self, worker: _Worker) -> None:
        """End a worker; a fresh one takes its place."""
        self._remove(worker)
        self._processes.drop(worker.number)

    def _release_all(self, reason: str) -> None:
        for worker in list(self._workers.values()):
            if worker.run:
                self._tell_left(worker, reason, fault=False)
                self._replace(worker)

    def _remove(self, worker: _Worker) -> None:
        self._workers.pop(worker.number, None)
        for key in worker.holds:
            self._drop_share(key, worker.number)

    def _drop_share(self, key: _ShareKey, number: int) -> None:
        """Note that a worker no longer holds a shared value, and delete a value that no worker holds."""
        if key in self._shares:
            holders = self._shares[key].holders
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
        workers = [WorkerRecord(w.number, pids.get(w.number, 0), w.run, w.tasks) for w in self._workers.values()]
        return MachineRecord(
            self.id, socket.gethostname(), os.getpid(), shoal.__version__, workers, self._count - len(workers),
            (self._done - before) / max(now - since, 1e-3), self._refused_by, self._link.refusals.count,
        )  # fmt: skip

    # From workers to heads ------------------------------------------------------------------------------------

    def _take_all(self, events: Collection[Event]) -> None:
        alive: dict[tuple[str, int], list[int]] = {}
        for event in events:
            if isinstance(event, Broken):
                raise event.error
            worker = self._workers.get(event.worker)
            if isinstance(event, Received):
                self._from_worker(event.worker, worker, event.message)
            elif worker is None:
                continue
            elif isinstance(event, Heard) and worker.run:
                alive.setdefault((worker.run, worker.epoch), []).append(worker.number)
            elif isinstance(event, Left):
                self._remove(worker)
                if worker.run:
                    self._tell_left(worker, event.reason, fault=True)
        for (run, epoch), numbers in alive.items():
            self._tell(run, epoch, -1, Message(Word.ALIVE, 0, msgspec.msgpack.encode(numbers)))

    def _from_worker(self, number: int, worker: _Worker | None, message: Message) -> None:
        if message.kind == Kind.HELLO:
            self._workers[number] = _Worker(number, message.frame)
            self._processes.send(number, self._welcome(None))
            self._look_at = 0.0
        elif worker is not None and worker.run:
            worker.tasks += 1
            self._done += 1
            if len(message.frame) > LARGEST:
                error = WireError(f"a result has {len(message.frame):,} bytes; Redis takes at most {LARGEST:,}")
                message = failed(message.number, error)
            self._tell(worker.run, worker.epoch, number, message)

    def _welcome(self, main: str | None) -> Message:
        """Settings for a worker. This machine, not the head, decides which modules the worker may use."""
        settings = {"path": list(sys.path), "main": main if MAIN in self._allow else None, "allow": list(self._allow)}
        return Message(Kind.WELCOME, 0, wire.encode(settings))

    # From heads to workers ------------------------------------------------------------------------------------

    def _sort(self, content: bytes) -> None:
        try:
            header, frame = unseal(self._server.key, self._inbox, content, Header)
            if header.machine != self.id:
                raise WireError("a message is for another machine")
            self._seen.check(header)
            if header.kind == Word.LOOK:
                self._look_at = 0.0
                return
            worker = self._workers.get(header.worker)
            if worker is not None and (worker.run, worker.epoch) == (header.run, header.epoch):
                self._to_worker(worker, header, frame)
        except WireError as error:
            self._link.refusals.add(self._inbox, error)

    def _to_worker(self, worker: _Worker, header: Header, frame: memoryview) -> None:
        key = (header.run, header.epoch, header.number)
        if header.kind == Kind.TASK:
            self._give(worker, header.number, frame)
        elif header.kind == Kind.SHARE:
            self._share(worker, key)
        elif header.kind == Kind.FORGET:
            worker.holds.discard(key)
            self._drop_share(key, worker.number)
            self._processes.send(worker.number, Message(Kind.FORGET, header.number))
        elif header.kind == Kind.WELCOME:
            self._processes.send(worker.number, self._welcome(_main_of(frame)))
        elif header.kind == Word.LEAVE:
            self._replace(worker)
        elif header.kind == Word.REFUSE:
            self._refused_by[worker.run] = bytes(frame[:2000]).decode(errors="replace")
            log.warning("a run refused this machine: %s", self._refused_by[worker.run])
            worker.run = ""
            self._look_at = 0.0
        else:
            raise WireError(f"a machine does not accept messages of this kind: {header.kind}")

    def _give(self, worker: _Worker, ticket: int, frame: memoryview) -> None:
        """Pass a task on if workers of this machine may run it."""
        try:
            match wire.decode(frame, _AnyShared()):
                case (str(name), [*_]):
                    self._functions.permit(name)
                case _:
                    raise WireError("a task is not a name and a list of arguments")
        except UsageError as error:
            self._link.refusals.add(self._inbox, WireError(str(error)))
            self._tell(worker.run, worker.epoch, worker.number, failed(ticket, error))
            return
        self._processes.send(worker.number, Message(Kind.TASK, ticket, frame))

    def _share(self, worker: _Worker, key: _ShareKey) -> None:
        """Give a worker a shared value, or give the worker up if the server no longer has it."""
        share = self._shares.get(key) or self._fetch(key)
        if share is None:
            self._tell_left(worker, "could not get a shared value: the server has lost it", fault=False)
            self._replace(worker)
            return
        self._shares[key] = share
        share.holders.add(worker.number)
        worker.holds.add(key)
        _, _, number = key
        self._processes.send(worker.number, Message(Kind.SHARE, number, share.frame))

    def _fetch(self, key: _ShareKey) -> _Share | None:
        """Get a shared value from the server; None if it is gone. Refuses invalid bytes here, not in each worker."""
        name = share_key(*key)
        content: Any = self._link.connection.get(name)
        if content is None:
            return None
        _, frame = unseal(self._server.key, name, content, type(None))
        wire.decode(frame)
        return _Share(frame)


class _AnyShared(Mapping[int, None]):
    """Stands for shared values where only the shape of a message matters."""

    def __getitem__(self, number: int) -> None:
        return None

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


def failed(ticket: int, error: Exception) -> Message:
    """Build the answer to a task that was not run."""
    return Message(Kind.FAILED, ticket, wire.encode({"seconds": 0.0, **describe_error(error)}))


def _main_of(frame: memoryview) -> str | None:
    settings = wire.decode(frame)
    main = settings.get("main") if type(settings) is dict else None
    return main if type(main) is str else None
