"""Workers as ranks of an MPI job: rank 0 is the head, the other ranks serve it. Only buffers are sent, never pickles.

A message is a prefix and a frame, sent from one rank to another. A shared value is announced to all ranks and then
broadcast once. Only the engine's thread makes MPI calls on the head. Both sides poll for messages and sleep in between:
MPI's blocking calls spin, which would take a core from the learner or from the environments.

A rank that dies ends the whole job; `shoal.commands.mpirun` restarts it from the last checkpoint.
"""

from __future__ import annotations

import atexit
import itertools
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal.base import signals
from shoal.base.backoff import Backoff
from shoal.engines.remote import Broken, Event, Heard, Received, RemoteEngine
from shoal.engines.scheduler import Scheduler
from shoal.engines.wire import PREFIX, Buffer, Kind, Message
from shoal.engines.worker import Server, serve
from shoal.errors import MissingExtra, UsageError, WorkerRefused

_CONTROL = 0  # tag of messages to idle ranks; each engine has its own tag, so that late messages are recognised
_DETACH, _ATTACH, _RELEASE, _RELEASED = 100, 101, 102, 103  # kinds, in addition to those of `wire.Kind`
_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds of sleep between polls, growing while no message arrives
LOST = 75
"""Exit code of a job that gave up on a rank."""
_PATIENCE = 5.0  # seconds for ranks to end by themselves
_Request = Any  # mpi4py.MPI.Request; mpi4py is optional and has no types


class MPIEngine(RemoteEngine):
    """Runs tasks on all other ranks of this MPI job. On those ranks, the constructor serves the head and then exits."""

    _tags = itertools.count(1)

    def __init__(
        self, workers: int | None = None, *, task_timeout: float | None = None, allow_mixed: bool = False
    ) -> None:
        job = MPIJob.of_this_process()
        if job.rank:
            job.serve()
            sys.exit(0)
        if workers not in (None, job.size - 1) or job.size == 1:
            wanted = 2 if workers is None else workers
            raise UsageError(
                f"the mpi engine has one worker per rank except the first, and this job has {job.size} rank(s), "
                f"so it cannot have {wanted} worker(s). Run: mpirun -n {wanted + 1} ..."
            )
        if job.in_use:
            raise UsageError("this MPI job's ranks already serve an engine. Close it before you make another one")
        job.in_use = True
        scheduler = Scheduler(task_timeout=task_timeout, lease=float("inf"))
        transport = MPITransport(job, next(self._tags))
        super().__init__(transport, workers=job.size - 1, scheduler=scheduler, allow_mixed=allow_mixed)


class MPIJob:
    """The MPI job that this process is a rank of, with a separate communicator: a user's messages cannot mix in."""

    _only: MPIJob | None = None

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError:
            raise MissingExtra("the mpi engine needs mpi4py. Install it with: pip install 'shoal[mpi]'") from None
        self.mpi: Any = MPI
        self.comm: Any = MPI.COMM_WORLD.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.in_use = False
        if self.rank == 0 and self.size > 1:
            atexit.register(self.release)

    @classmethod
    def of_this_process(cls) -> MPIJob:
        """Return the only instance. The first call is collective: all ranks have to make it."""
        if cls._only is None:
            cls._only = cls()
        return cls._only

    def look(self, tag: int) -> tuple[int, Message] | None:
        """Return a message that has arrived and its sender. Other tags are of engines that closed: drop these."""
        status = self.mpi.Status()
        while self.comm.Iprobe(status=status):
            source, found = status.Get_source(), status.Get_tag()
            prefix = bytearray(PREFIX.size)
            self.comm.Recv(prefix, source, found)
            kind, number, size = PREFIX.unpack(prefix)
            frame = bytearray(size)
            if kind == Kind.SHARE:
                self.comm.Ibcast(frame).Wait()
            elif size:
                self.comm.Recv(frame, source, found)
            if found == tag:
                return source, Message(kind, number, frame)
        return None

    def wait(self, tag: int) -> Message:
        """Wait for the next message with this tag."""
        pauses = _polling_pauses()
        while (found := self.look(tag)) is None:
            time.sleep(pauses.next())
        return found[1]

    def send(self, rank: int, tag: int, message: Message) -> None:
        """Send one message and wait until its buffer is free again."""
        self.comm.Send(PREFIX.pack(message.kind, message.number, len(message.frame)), rank, tag)
        if message.frame:
            self.comm.Send(message.frame, rank, tag)

    def serve(self) -> None:
        """On every rank but the head: serve the head's engines, one after the other, until it releases this rank."""
        for number in signals.STOP:  # the head handles them: it saves, then releases the ranks
            signal.signal(number, signal.SIG_IGN)
        while True:
            order = self.wait(_CONTROL)
            if order.kind == _RELEASE:
                self.send(0, _CONTROL, Message(_RELEASED, 0))
                return
            self._serve_engine(order.number)

    def _serve_engine(self, tag: int) -> None:
        def receive() -> Message | None:
            message = self.wait(tag)
            return None if message.kind == _DETACH else message

        serve(Server(), receive, lambda message: self.send(0, tag, message))

    def release(self) -> None:
        """On the head, at exit: let all ranks end. Abort the job if some are still busy after a few seconds."""
        for rank in range(1, self.size):
            self.comm.Isend(PREFIX.pack(_RELEASE, 0, 0), rank, _CONTROL)
        remaining, deadline = set(range(1, self.size)), time.monotonic() + _PATIENCE
        while remaining and time.monotonic() < deadline:
            found = self.look(_CONTROL)
            if found is None:
                time.sleep(_LONGEST)
            else:
                remaining.discard(found[0])
        if remaining:
            sys.stdout.flush()
            self.comm.Abort(0)


def _polling_pauses() -> Backoff:
    return Backoff(_SHORTEST, _LONGEST, factor=1.2)


class MPITransport:
    """Worker w is rank w + 1. Only the pump thread calls MPI; other threads queue their messages."""

    def __init__(self, job: MPIJob, tag: int) -> None:
        self._job, self._tag = job, tag
        self._out: deque[tuple[int, Message]] = deque((rank, Message(_ATTACH, tag)) for rank in range(1, job.size))
        self._event = threading.Event()
        self._requests: list[tuple[_Request, Buffer]] = []  # sends in progress, and the buffers that MPI reads
        self._broadcast: set[int] = set()  # shared values that all ranks have
        self._joined: set[int] = set()
        self._heard_at = 0.0

    def poll(self, timeout: float) -> Sequence[Event]:
        events: list[Event] = []
        begun, pauses = time.monotonic(), _polling_pauses()
        while True:
            self._event.clear()
            self._write()
            while (found := self._job.look(self._tag)) is not None:
                rank, message = found
                self._joined.add(rank - 1)
                events.append(Received(rank - 1, message))
            now = time.monotonic()
            if events or now - begun >= timeout:
                break
            if self._event.wait(pauses.next()) and not self._out:  # woken, but not to send
                break
        if now >= self._heard_at:  # a rank that dies ends the job, so all ranks are alive
            self._heard_at = now + 1.0
            events += [Heard(worker) for worker in self._joined]
        return events

    def _write(self) -> None:
        comm = self._job.comm
        self._requests = [pair for pair in self._requests if not pair[0].Test()]
        while self._out:
            rank, message = self._out.popleft()
            if message.kind in (Kind.SHARE, Kind.FORGET):
                self._to_all(message)
                continue
            tag = _CONTROL if message.kind == _ATTACH else self._tag
            prefix = PREFIX.pack(message.kind, message.number, len(message.frame))
            self._requests.append((comm.Isend(prefix, rank, tag), prefix))
            if message.frame:
                self._requests.append((comm.Isend(message.frame, rank, tag), message.frame))

    def _to_all(self, message: Message) -> None:
        """Send a shared value to all ranks when the first one needs it; tell all ranks to forget it."""
        new = message.kind == Kind.SHARE
        if (message.number in self._broadcast) == new:
            return
        (self._broadcast.add if new else self._broadcast.remove)(message.number)
        comm, prefix = self._job.comm, PREFIX.pack(message.kind, message.number, len(message.frame))
        for rank in range(1, self._job.size):
            self._requests.append((comm.Isend(prefix, rank, self._tag), prefix))
        if new:
            self._requests.append((comm.Ibcast(message.frame), message.frame))

    def send(self, worker: int, message: Message) -> None:
        self._out.append((worker + 1, message))
        self._event.set()

    def wake(self) -> None:
        self._event.set()

    def drop(self, worker: int) -> None:
        print(
            f"error: gave up on rank {worker + 1}. MPI cannot replace one rank, so the job ends here; "
            f"continue from the last checkpoint with: shoal resume",
            file=sys.stderr,
            flush=True,
        )
        self._job.comm.Abort(LOST)

    def refuse(self, worker: int, error: WorkerRefused) -> Sequence[Event]:
        return [Broken(error)]

    def close(self) -> None:
        for rank in range(1, self._job.size):
            self._out.append((rank, Message(_DETACH, 0)))
        self._write()
        deadline = time.monotonic() + _PATIENCE
        while self._requests and time.monotonic() < deadline:
            self._job.look(self._tag)  # a rank that is sending a result receives nothing until it has sent it
            self._requests = [pair for pair in self._requests if not pair[0].Test()]
            time.sleep(_SHORTEST)
        self._job.in_use = False


def main() -> None:
    """Serve the head of this MPI job, on a rank that runs nothing else."""
    MPIJob.of_this_process().serve()


if __name__ == "__main__":
    main()
