"""Workers as processes on this machine, each connected by a socket pair. The default engine.

Processes are spawned, not forked, so that they never inherit the head's JAX threads and memory. A pidfd reports a death
at once, even while a child of the worker still holds the socket; the process table shows a worker that was stopped
(SIGSTOP). Either way a new process replaces it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.base.backoff import Backoff
from shoal.base.host import WORKER_ENVIRONMENT, available_cores, module_command, python_path
from shoal.engines import wire
from shoal.engines.remote import Broken, Event, Heard, Left, Received, RemoteEngine
from shoal.engines.scheduler import Scheduler
from shoal.engines.wire import PREFIX, Message
from shoal.errors import EngineError, WorkerRefused

_LOOK_EVERY = 1.0  # seconds between checks of the process table
_FAILED_STARTS = 3  # in a row, before the engine fails


class ProcessesEngine(RemoteEngine):
    """Runs tasks on processes of this machine (default: one per core)."""

    def __init__(
        self,
        workers: int | None = None,
        *,
        task_timeout: float | None = None,
        lease: float = 10.0,
        allow_mixed: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        count = available_cores() if workers is None else workers
        self._processes = ProcessTransport(count, environment or {})
        scheduler = Scheduler(task_timeout=task_timeout, lease=lease)
        super().__init__(self._processes, workers=count, scheduler=scheduler, allow_mixed=allow_mixed)

    @property
    def pids(self) -> list[int]:
        return list(self._processes.numbered_pids().values())

    @property
    def shared_cores(self) -> int:
        return available_cores()


@dataclass(slots=True)
class _Process:
    number: int
    popen: subprocess.Popen[bytes]
    socket: socket.socket
    handle: int  # pidfd; -1 on systems that have none
    joined: bool = False
    out: deque[memoryview] = field(default_factory=deque)
    prefix: bytearray = field(default_factory=lambda: bytearray(PREFIX.size))
    frame: bytearray | None = None  # None while the prefix is being read
    filled: int = 0


class ProcessTransport:
    """Keeps `count` worker processes running. A lock guards the outgoing queues; the pump thread owns the rest."""

    def __init__(self, count: int, environment: Mapping[str, str]) -> None:
        self._missing = count
        self._environment = {**os.environ, **WORKER_ENVIRONMENT, **environment}
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._next_number = 0
        self._failed_starts = 0
        self._pauses = Backoff(0.4, 6.4, factor=4)
        self._start_at = 0.0
        self._look_at = 0.0

    def numbered_pids(self) -> dict[int, int]:
        """Return the process ids of the running workers by worker number, oldest first."""
        with self._lock:
            return {number: process.popen.pid for number, process in self._processes.items()}

    # The pump thread ------------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> Sequence[Event]:
        """Return what happened, and start the processes that are missing."""
        now = time.monotonic()
        # Not in the constructor: the kernel ends a worker with the thread that started it, and the pump thread lives
        # as long as the engine.
        while self._missing and now >= self._start_at:
            try:
                self._start()
            except OSError as error:
                return [Broken(self._cannot_start_more(error))]
        if self._missing:
            timeout = min(timeout, self._start_at - now)
        events: list[Event] = []
        for ready, mask in self._selector.select(max(timeout, 0.0)):
            process: _Process | None = ready.data
            if process is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_out, 4096)
            elif process.number not in self._processes:
                continue  # its end was handled earlier in this loop
            elif ready.fileobj == process.handle:
                self._read(process, events)
                self._gone(process, events)
            elif mask & selectors.EVENT_READ and not self._read(process, events):
                self._gone(process, events)
        self._write_all()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            events += [
                Heard(p.number)
                for p in self._processes.values()
                if p.joined and process_state(p.popen.pid) not in ("T", "t")
            ]
        return events

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = module_command("shoal.engines.worker", str(theirs.fileno()), str(os.getpid()))
        try:
            # A new session shields the worker from the terminal's Ctrl-C and lets `_end` kill its children too.
            popen = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=self._environment | {"PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        handle = os.pidfd_open(popen.pid) if hasattr(os, "pidfd_open") else -1
        process = _Process(self._next_number, popen, ours, handle)
        self._next_number += 1
        self._missing -= 1
        with self._lock:
            self._processes[process.number] = process
        self._selector.register(ours, selectors.EVENT_READ, process)
        if handle >= 0:
            self._selector.register(handle, selectors.EVENT_READ, process)

    def _cannot_start_more(self, error: OSError) -> EngineError:
        running = len(self._processes)
        return EngineError(
            f"worker {running + 1} of {running + self._missing} could not be started: {error.strerror}. "
            f"Use fewer --workers, or raise the limit (ulimit -n for files, ulimit -u for processes)"
        )

    def _read(self, process: _Process, events: list[Event]) -> bool:
        """Read all messages that have arrived; return False at the end of the stream."""
        while True:
            target = process.prefix if process.frame is None else process.frame
            if process.filled < len(target):
                try:
                    count = process.socket.recv_into(memoryview(target)[process.filled :])
                except BlockingIOError:
                    return True
                except ConnectionResetError:
                    return False
                if count == 0:
                    return False
                process.filled += count
            if process.filled < len(target):
                continue
            process.filled = 0
            kind, number, size = PREFIX.unpack(process.prefix)
            if process.frame is None:
                if size > wire.MAX_FRAME:
                    return False
                process.frame = bytearray(size)
            else:
                events.append(Received(process.number, Message(kind, number, process.frame)))
                process.frame = None
                process.joined = True
                self._failed_starts = 0
                self._pauses.reset()

    def _gone(self, process: _Process, events: list[Event]) -> None:
        """Clean up after a worker that ended by itself, report how it ended, and have another started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(0.5)  # the socket closes a moment before the exit code is known
        reason = self._end(process)
        self._missing += 1
        if not process.joined:
            self._failed_starts += 1
            self._start_at = time.monotonic() + self._pauses.next()
            if self._failed_starts >= _FAILED_STARTS:
                events.append(Broken(_cannot_start(reason)))
        events.append(Left(process.number, reason))

    def _end(self, process: _Process) -> str:
        """Kill a worker and its children, wait for it, and describe how it ended."""
        with self._lock:
            self._processes.pop(process.number, None)
        self._selector.unregister(process.socket)
        if process.handle >= 0:
            self._selector.unregister(process.handle)
            os.close(process.handle)
        process.socket.close()
        by_itself = process.popen.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        code = process.popen.wait()
        if not by_itself:
            return "was ended"
        return f"died ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"

    def _write_all(self) -> None:
        with self._lock:
            for process in self._processes.values():
                self._write(process)

    # Any thread -----------------------------------------------------------------------------------------------

    def send(self, worker: int, message: Message) -> None:
        """Write as much as the socket takes; the pump thread writes the rest."""
        with self._lock:
            process = self._processes.get(worker)
            if process is None:
                return
            process.out.append(memoryview(PREFIX.pack(message.kind, message.number, len(message.frame))))
            process.out.append(memoryview(message.frame))
            self._write(process)

    def _write(self, process: _Process) -> None:
        """Write as much as the socket takes; the selector reports when it takes more."""
        try:
            while process.out:
                buffers = list(process.out)[:64]
                count = process.socket.sendmsg(buffers)
                while process.out and count >= len(process.out[0]):
                    count -= len(process.out.popleft())
                if count:
                    process.out[0] = process.out[0][count:]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            process.out.clear()  # the worker is dead, as the pump thread is about to see
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.out else 0)
        key = self._selector.get_key(process.socket)
        if key.events != wanted:
            self._selector.modify(process.socket, wanted, process)
            self.wake()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so `poll` is going to return anyway
            os.write(self._wake_in, b"!")

    def drop(self, worker: int) -> None:
        process = self._processes.get(worker)
        if process is not None:
            self._end(process)
            self._missing += 1

    def refuse(self, worker: int, error: WorkerRefused) -> Sequence[Event]:
        return [Broken(error)]

    def close(self) -> None:
        for process in list(self._processes.values()):
            self._end(process)
        self._selector.close()
        os.close(self._wake_out)
        os.close(self._wake_in)


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state (T: stopped by a signal); "" without such a process or /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _cannot_start(reason: str) -> EngineError:
    return EngineError(
        f"worker processes cannot be started: {_FAILED_STARTS} in a row ended before they were ready (the last one "
        f"{reason}). Their output is above. Likely causes: a broken install or too little memory. "
        f"To find out more, run: shoal doctor"
    )
