"""What `shoal redis` does: start and stop a server on this machine, show what is on a server, and flush it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.engines.redis.address import Address, cannot_reach, state_folder
from shoal.engines.redis.envelope import Refusals
from shoal.engines.redis.link import TIMEOUT
from shoal.engines.redis.local_server import ROLES, LocalServer, flush
from shoal.engines.redis.records import HeadRecord, MachineRecord, Registry
from shoal.errors import UsageError

if TYPE_CHECKING:
    import redis


@dataclass(frozen=True)
class RedisStart:
    """A server that was started on this machine."""

    url: str
    pid: int
    connection_file: Path
    role_urls: dict[str, str]
    """Address for each role; empty without roles."""


@dataclass(frozen=True)
class RedisStatus:
    """The machines and runs on a server."""

    machines: list[MachineRecord]
    heads: list[HeadRecord]
    ages: dict[str, float]
    """Seconds since the last heartbeat, by machine id."""


def start_server(port: int | None, roles: bool) -> RedisStart:
    """Start this user's server on this machine (default port: a free one), with a user for each role if asked."""
    local = LocalServer(state_folder())
    if local.running():
        raise UsageError(f"a server is already running at {local.address.url}. To stop it: shoal redis stop")
    if port is not None and not 0 < port < 2**16:
        raise UsageError(f"port must be in 1..65535, not {port}")
    local.configure(port, roles)
    process = local.launch(detached=True)
    process.returncode = 0  # the server outlives this process, so nothing waits for it
    url = local.address.url
    role_urls = {
        role: f"{url.replace('admin@', f'{role}@')}?password_file={local.password_file(role)}"
        for role in (ROLES if roles else ())
    }
    return RedisStart(url, process.pid, local.connection_file, role_urls)


def stop_server() -> str:
    """Stop this user's server on this machine, and return its address."""
    local = LocalServer(state_folder())
    url = local.address.url
    local.stop()
    return url


def read_status(server: Address) -> RedisStatus:
    """Read the records on a server."""
    with _connected(server) as connection:
        registry = Registry(connection, server.key, Refusals())
        machines, heads = registry.machines(), registry.heads()
        ages = {machine.id: machine.lease - int(connection.pttl(machine.key)) / 1000 for machine in machines}
    return RedisStatus(machines, heads, ages)


def flush_server(server: Address) -> int:
    """Remove all of Shoal's keys from a server, and return their number."""
    with _connected(server) as connection:
        return flush(connection)


@contextlib.contextmanager
def _connected(server: Address) -> Iterator[redis.Redis]:
    """Connect for the length of a block; UsageError if the server cannot be used."""
    connection = server.open(TIMEOUT)
    import redis

    try:
        yield connection
    except (redis.RedisError, OSError) as error:
        raise UsageError(cannot_reach(server, error)) from None
    finally:
        connection.close()
