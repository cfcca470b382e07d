"""Connections between rank 0 and the other ranks: JSON lines over TCP.

Rank 0 leaves a file with its addresses and a secret in the shared folder. A file of an earlier job does no harm: either
no process listens there any more, or the secret is another.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

from shoal.commands.up.allocation import Allocation
from shoal.errors import EngineError

FILE = "leader.json"
CONNECT_SECONDS = 3.0
"""Time for one address to answer."""
_WELCOME_SECONDS = 30.0  # rank 0 may be busy, and a reconnect would look like a rank that joined and died
_MAX_LINE = 64 * 1024  # bytes of a message
_LOOK = 0.1  # seconds between looks for the file


class LeaderFile(TypedDict):
    """Content of the file that rank 0 leaves for the others."""

    addresses: list[str]
    port: int
    token: str


class RankHello(TypedDict):
    """A rank's first message. `cores` and `limit` are those of its `Allocation`."""

    rank: int
    machine: str
    cores: list[int]
    limit: int | None
    token: str


class RankReport(TypedDict):
    """A rank's news about its node; `said` is the failure, if any."""

    state: Literal["", "joined", "failed", "stopped"]
    said: str


class Order(TypedDict):
    """Rank 0's answer to a hello (welcome), or its order to end."""

    do: Literal["welcome", "end"]


class StartNode(TypedDict):
    """Rank 0's order to start a node; the other fields are those of `NodeSpec`."""

    do: Literal["node"]
    ip: str
    cores: list[int]
    limit: int | None
    token: str
    address: str
    folder: str


def machine_id() -> str:
    """Identify this machine by Slurm's name or the host name, and its boot id in case two machines share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        boot = ""
    return f"{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}/{boot}"


def host_name(machine: str) -> str:
    """Return the readable part of a `machine_id`."""
    return machine.partition("/")[0]


class RankLink:
    """One end of a connection between rank 0 and another rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.waiting: list[dict[str, object]] = []
        """Messages that arrived together with the welcome."""
        self._buffer = b""

    def send(self, message: Mapping[str, object]) -> None:
        """Send one message; does nothing if the other end is gone."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, object]] | None:
        """Wait for data and return the complete messages in it; None once the other end is gone."""
        try:
            data = self.socket.recv(_MAX_LINE)
        except OSError:
            return None
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if not data or len(self._buffer) > _MAX_LINE:
            return None
        try:
            return [message for line in lines if isinstance(message := json.loads(line), dict)]
        except ValueError:
            return None


def connect_to_leader(allocation: Allocation, folder: Path, deadline: float) -> RankLink:
    """Wait for rank 0's file and connect. `deadline` is on the monotonic clock."""
    why = f"there is no {folder / FILE}"
    while time.monotonic() < deadline:
        try:
            leader: LeaderFile = json.loads((folder / FILE).read_text())
        except (OSError, ValueError):
            time.sleep(_LOOK)
            continue
        for address in leader["addresses"]:
            try:
                return _connect(address, leader, allocation)
            except OSError as error:
                why = f"{address}:{leader['port']}: {error}"
        time.sleep(_LOOK)
    raise EngineError(
        f"rank {allocation.rank} on {socket.gethostname()} did not find rank 0: {why}. If the ranks do not share this "
        f"folder, choose one that they share: --folder PATH"
    )


def _connect(address: str, leader: LeaderFile, allocation: Allocation) -> RankLink:
    """Connect to one address and wait for the welcome, which only the rank 0 of this job sends."""
    connection = socket.create_connection((address, leader["port"]), timeout=CONNECT_SECONDS)
    connection.settimeout(_WELCOME_SECONDS)
    link = RankLink(connection)
    hello: RankHello = {
        "rank": allocation.rank,
        "machine": machine_id(),
        "cores": list(allocation.cores),
        "limit": allocation.limit,
        "token": leader["token"],
    }
    link.send(hello)
    messages = link.receive()
    if not messages:
        connection.close()
        raise ConnectionRefusedError("not rank 0 of this job")
    connection.settimeout(None)
    link.waiting = messages[1:]
    return link
