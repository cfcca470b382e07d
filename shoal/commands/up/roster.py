"""All other ranks, as rank 0 sees them."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from shoal.commands.up.link import (
    CONNECT_SECONDS,
    FILE,
    LeaderFile,
    Order,
    RankHello,
    RankLink,
    RankReport,
    host_name,
)
from shoal.commands.up.node import LOOPBACK_IP


@dataclass
class Member:
    """Another rank of the job."""

    rank: int
    machine: str
    cores: Sequence[int]
    """Numbers of the cores that it may use."""
    limit: int | None
    """Number of its machine's CPUs that belong to the job, if the scheduler sets it."""
    ip: str
    """Its address on the network through which it reached rank 0."""
    link: RankLink
    state: Literal["", "joined", "failed", "stopped", "gone"] = ""
    """The last state it reported, or "gone" once its connection has ended."""
    failure: str = ""

    @property
    def host(self) -> str:
        return host_name(self.machine)


class Roster:
    """Accepts the other ranks and keeps track of their states."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.members: dict[int, Member] = {}
        self.reached_at = LOOPBACK_IP
        """This machine's address on the network through which the others connect."""
        self.token = secrets.token_hex(32)
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        if self.size > 1:
            self._listener = self._listen()

    def _listen(self) -> socket.socket:
        listener = socket.create_server(("", 0), backlog=1024)
        self._selector.register(listener, selectors.EVENT_READ)
        content: LeaderFile = {"addresses": _addresses(), "port": listener.getsockname()[1], "token": self.token}
        temporary = self.folder / f".{FILE}-{os.getpid()}"
        temporary.touch(0o600)
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / FILE)
        return listener

    @property
    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return [rank for rank in range(1, self.size) if rank not in self.members]

    def poll(self, timeout: float) -> list[Member]:
        """Handle events for at most `timeout` seconds, and return the members that have news."""
        if not self._selector.get_map():
            time.sleep(timeout)  # there is nothing to wait for
            return []
        news: list[Member] = []
        for key, _ in self._selector.select(timeout):
            if self._listener is not None and key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                connection.settimeout(CONNECT_SECONDS)
                self._selector.register(connection, selectors.EVENT_READ, RankLink(connection))
            else:
                news += self._read(key.data)
        if not self.missing:
            self._stop_listening()
        return news

    def _read(self, link: RankLink) -> list[Member]:
        """Read one connection, and return its member if there are news."""
        member = next((one for one in self.members.values() if one.link is link), None)
        messages = link.receive()
        if messages is None:
            self._disconnect(link)
            if member is None or member.state == "stopped":
                return []
            member.state = "gone"
            return [member]
        for message in messages:
            if member is None:
                member = self._admit(link, message)
                if member is None:
                    return []
            elif "state" in message:
                report = cast(RankReport, message)
                member.state, member.failure = report["state"], report.get("said", "")
        return [] if member is None or not messages else [member]

    def _admit(self, link: RankLink, message: dict[str, object]) -> Member | None:
        """Welcome a rank that knows the secret; close any other connection."""
        rank, token = message.get("rank"), str(message.get("token"))
        is_known = hmac.compare_digest(token.encode(), self.token.encode())
        if not is_known or not isinstance(rank, int) or rank not in range(1, self.size):
            self._disconnect(link)
            return None
        hello = cast(RankHello, message)
        ip, here = link.socket.getpeername()[0], link.socket.getsockname()[0]
        member = Member(rank, hello["machine"], hello["cores"], hello["limit"], ip, link)
        self.members[rank] = member
        link.send(Order(do="welcome"))
        if not here.startswith("127."):
            self.reached_at = here
        return member

    def _disconnect(self, link: RankLink) -> None:
        self._selector.unregister(link.socket)
        link.socket.close()

    def _stop_listening(self) -> None:
        """Close the port and remove the file; called as soon as all ranks have connected."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            (self.folder / FILE).unlink(missing_ok=True)

    def broadcast(self, order: Order) -> None:
        """Send an order to all connected ranks."""
        for member in self.members.values():
            member.link.send(order)

    def close(self) -> None:
        self._stop_listening()
        for member in self.members.values():
            member.link.socket.close()
        self._selector.close()


def _addresses() -> list[str]:
    """List the IPv4 addresses of this machine, loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))
