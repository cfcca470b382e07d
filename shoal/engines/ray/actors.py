"""The code that runs on the nodes: workers, and a watcher on every machine but the head's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from shoal.engines import wire
from shoal.engines.fingerprint import fingerprint
from shoal.engines.processes import process_state
from shoal.engines.wire import Kind, Message
from shoal.engines.worker import Server


class ActorHello(TypedDict):
    """A worker's first message."""

    fingerprint: dict[str, str]
    pid: int
    process_table: str
    """The worker's `process_table_id`."""
    node: str
    """Ray's id of the node."""


def process_table_id() -> str:
    """Identify the process table that this process sees: pids are comparable only within one table."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()


def live_processes(pids: Sequence[int]) -> list[tuple[int, bool]]:
    """Pick the processes that are alive, each with whether it can run, that is, is not stopped by a signal."""
    states = {pid: process_state(pid) for pid in pids}
    return [(pid, state not in "Tt") for pid, state in states.items() if state and state not in "ZX"]


def kill_if_stopped(pid: int) -> None:
    """Kill a worker that is stopped by a signal: it does not react to `ray.kill`."""
    if process_state(pid) in ("T", "t"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class WorkerActor:
    """A `Server` as a Ray actor. Messages are bytes, so Ray pickles no data."""

    def __init__(self) -> None:
        self._server = Server()

    def hello(self) -> bytes:
        """Return an encoded `ActorHello`."""
        import ray

        hello: ActorHello = {
            "fingerprint": fingerprint(),
            "pid": os.getpid(),
            "process_table": process_table_id(),
            "node": ray.get_runtime_context().get_node_id(),
        }
        return bytes(wire.encode(hello))

    def take(self, kind: int, number: int, frame: bytes) -> bytes:
        """Handle a message. The reply is a frame followed by its kind, so that arrays in the frame stay aligned."""
        if kind == Kind.WELCOME:
            # Modules shipped with the runtime environment take precedence over the head's.
            settings = wire.decode(frame)
            settings["path"] = [*sys.path, *(entry for entry in settings["path"] if entry not in sys.path)]
            frame = bytes(wire.encode(settings))
        reply = self._server.handle(Message(kind, number, frame))
        return b"" if reply is None else b"".join([reply.frame, bytes([reply.kind])])


class NodeWatcher:
    """Reads the process table of another machine: a worker in the middle of a task cannot answer for itself."""

    def live_processes(self, pids: bytes) -> bytes:
        return bytes(wire.encode([list(process) for process in live_processes(wire.decode(pids))]))

    def kill_if_stopped(self, pid: int) -> None:
        kill_if_stopped(pid)
