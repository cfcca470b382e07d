"""What runs on the nodes: workers, and on other machines than the head's one that looks after them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.engines import wire
from shoal.engines.fingerprint import fingerprint
from shoal.engines.processes import process_state
from shoal.engines.wire import Kind, Message
from shoal.engines.worker import Server


def machine() -> str:
    """Equal for two processes if, and only if, they see the same process table."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()


def living(pids: Sequence[int]) -> list[tuple[int, bool]]:
    """Those processes that there are, and whether each may run: it is not stopped by a signal."""
    states = {pid: process_state(pid) for pid in pids}
    return [(pid, state not in "Tt") for pid, state in states.items() if state and state not in "ZX"]


def end_stopped(pid: int) -> None:
    """End a worker that is stopped by a signal and so does not hear Ray."""
    if process_state(pid) in ("T", "t"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Worker:
    """The actor."""

    def __init__(self) -> None:
        self._server = Server()

    def hello(self) -> bytes:
        """Who and where this is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return bytes(wire.encode([fingerprint(), os.getpid(), machine(), node]))

    def take(self, kind: int, number: int, frame: bytes) -> bytes:
        """Act on a message. The answer is a frame and its kind; behind, so that arrays stay where they are aligned."""
        if kind == Kind.WELCOME:
            # What the runtime environment has brought comes before what the head has at the same place.
            settings = wire.decode(frame)
            settings["path"] = [*sys.path, *(entry for entry in settings["path"] if entry not in sys.path)]
            frame = bytes(wire.encode(settings))
        reply = self._server.handle(Message(kind, number, frame))
        return b"" if reply is None else b"".join([reply.frame, bytes([reply.kind])])


class Watcher:
    """An actor on each other machine that looks at the process table: a worker that is at work cannot answer."""

    def living(self, pids: bytes) -> bytes:
        """`living` there."""
        return bytes(wire.encode([list(one) for one in living(wire.decode(pids))]))

    def end_stopped(self, pid: int) -> None:
        """`end_stopped` there."""
        end_stopped(pid)
