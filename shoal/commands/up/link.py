"""How ranks find rank 0, and how they talk with it: JSON lines over one TCP connection for each.

The file that rank 0 leaves in the shared folder holds its addresses and a secret. One from an earlier job does no harm:
nobody listens there, or whoever does knows another secret.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import EngineError

FILE = "head.json"
_LINE = 64 * 1024  # bytes of a message, at most
_CONNECT = 3.0  # seconds for one address to answer
_GREET = 30.0  # seconds for rank 0 to greet: it may be busy, and who comes twice looks like one who came and was gone
_LOOK = 0.1  # seconds between looks for the file


def machine() -> str:
    """Names this machine: what Slurm or the machine itself calls it, and a number that differs where names do not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        boot = ""
    return f"{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}/{boot}"


def name(machine: str) -> str:
    """The readable part."""
    return machine.partition("/")[0]


def addresses() -> list[str]:
    """IPv4 addresses of this machine, loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


class Line:
    """One connection, seen from either end."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.waiting: list[dict[str, Any]] = []
        """Messages that came with an earlier one."""
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; nothing if the other side is gone."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What is there now, waiting for the first bytes; None when the other side is gone."""
        try:
            data = self.socket.recv(_LINE)
        except OSError:
            return None
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if not data or len(self._buffer) > _LINE:
            return None
        try:
            return [message for line in lines if isinstance(message := json.loads(line), dict)]
        except ValueError:
            return None


@dataclass
class Member:
    """Another rank, as rank 0 knows it."""

    rank: int
    machine: str
    cores: Sequence[int]
    """Those that it may use, by number."""
    limit: int | None
    """How many CPUs of its machine belong to the job, if the scheduler says."""
    ip: str
    """Its address on the network by which it reached rank 0."""
    line: Line
    state: str = ""
    """What it said last: "", "joined", "failed" or "stopped"; "gone" when its connection ended."""
    said: str = ""


@dataclass
class Ranks:
    """Rank 0's side: all others, as they come, speak and go."""

    folder: Path
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    reached_at: str = "127.0.0.1"
    """This machine's address as the others reach it."""

    def __post_init__(self) -> None:
        self.token = secrets.token_hex(32)
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        if self.size == 1:
            return
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._selector.register(self._listener, selectors.EVENT_READ)
        content = {"addresses": addresses(), "port": self._listener.getsockname()[1], "token": self.token}
        temporary = self.folder / f".{FILE}-{os.getpid()}"
        temporary.touch(0o600)
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / FILE)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(1, self.size) if rank not in self.members]

    def poll(self, timeout: float) -> list[Member]:
        """Take what comes within a time; those members about which something is new."""
        news: list[Member] = []
        if not self._selector.get_map():
            time.sleep(timeout)  # nobody can come or speak
            return news
        for key, _ in self._selector.select(timeout):
            if self._listener is not None and key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                connection.settimeout(_CONNECT)
                self._selector.register(connection, selectors.EVENT_READ, Line(connection))
                continue
            line: Line = key.data
            member = next((one for one in self.members.values() if one.line is line), None)
            messages = line.receive()
            if messages is None:
                self._selector.unregister(line.socket)
                line.socket.close()
                if member is not None and member.state != "stopped":
                    member.state = "gone"
                    news.append(member)
                continue
            for message in messages:
                if member is None:
                    member = self._admit(line, message)
                elif isinstance(state := message.get("state"), str):
                    member.state, member.said = state, str(message.get("said", ""))
                if member is not None:
                    news.append(member)
        if not self.missing:
            self._stop_listening()
        return news

    def _stop_listening(self) -> None:
        """All are here, so there is no reason to be reached."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            (self.folder / FILE).unlink(missing_ok=True)

    def _admit(self, line: Line, message: dict[str, Any]) -> Member | None:
        rank, token = message.get("rank"), str(message.get("token"))
        known = hmac.compare_digest(token.encode(), self.token.encode())
        if not known or not isinstance(rank, int) or rank not in range(1, self.size):
            self._selector.unregister(line.socket)
            line.socket.close()
            return None
        ip, here = line.socket.getpeername()[0], line.socket.getsockname()[0]
        member = Member(rank, str(message["machine"]), message["cores"], message["limit"], ip, line)
        self.members[rank] = member
        line.send({"do": "welcome"})
        if not here.startswith("127."):
            self.reached_at = here
        return member

    def tell(self, message: dict[str, Any]) -> None:
        """Say the same to all who are here."""
        for member in self.members.values():
            member.line.send(message)

    def close(self) -> None:
        """No more."""
        self._stop_listening()
        for member in self.members.values():
            member.line.socket.close()
        self._selector.close()


def find(folder: Path, rank: int, cores: Sequence[int], limit: int | None, deadline: float) -> Line:
    """On another rank: wait for rank 0's file and connect. `deadline` is on the monotonic clock."""
    about = {"rank": rank, "machine": machine(), "cores": list(cores), "limit": limit}
    why = f"there is no {folder / FILE}"
    while time.monotonic() < deadline:
        try:
            content = json.loads((folder / FILE).read_text())
        except (OSError, ValueError):
            time.sleep(_LOOK)
            continue
        for address in content["addresses"]:
            try:
                connection = socket.create_connection((address, content["port"]), timeout=_CONNECT)
            except OSError as error:
                why = f"{address}:{content['port']} says {error}"
                continue
            connection.settimeout(_GREET)
            line = Line(connection)
            line.send(about | {"token": content["token"]})
            if messages := line.receive():  # rank 0 greets those whom it knows
                connection.settimeout(None)
                line.waiting = messages[1:]
                return line
            why = f"{address}:{content['port']} is not rank 0 of this job"
            connection.close()
        time.sleep(_LOOK)
    raise EngineError(
        f"rank {rank} on {socket.gethostname()} did not find rank 0: {why}. If the ranks do not see the same folder, "
        f"give one that they do: --folder PATH"
    )
