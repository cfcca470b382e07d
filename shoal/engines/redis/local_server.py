"""A Redis server on this machine with safe settings: loopback only, with a password, and no data on disk."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.base.lifetime import mortal
from shoal.engines.redis.address import Address, StartedServer
from shoal.engines.redis.envelope import PREFIX
from shoal.errors import UsageError

if TYPE_CHECKING:
    import redis

ROLES = {
    # Permissions as Redis ACL rules. Only the admin may run scripts, change settings or use keys other than Shoal's.
    "head": "~shoal:* -@all +ping +hello +auth +select +incrby +set +get +mget +del +rpush +blpop +lpop "
    "+pexpire +sadd +srem +smembers",
    "worker": "~shoal:machine:* ~shoal:to:* ~shoal:head:* ~shoal:runs ~shoal:machines %R~shoal:run:* %R~shoal:share:* "
    "-@all +ping +hello +auth +select +set +get +mget +del +rpush +blpop +lpop +pexpire +sadd +srem "
    "+smembers",
    "admin": "~* &* +@all",
}
_START_WITHIN = 10.0  # seconds


@dataclass(frozen=True)
class LocalServer:
    """A server whose files are in a folder that only this user can read."""

    folder: Path

    @property
    def connection_file(self) -> Path:
        """Path of the file with a `StartedServer`."""
        return self.folder / "connection.json"

    def password_file(self, role: str = "") -> Path:
        """Path of the file with the password; with `--acl`, that of a role."""
        return self.folder / (f"{role}.password" if role else "password")

    def configure(self, port: int | None = None, roles: bool = False) -> None:
        """Write the server's settings, with new passwords (default port: a free one)."""
        port = port or free_port()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)
        lines = [
            "bind 127.0.0.1",
            f"port {port}",
            "protected-mode yes",
            'save ""',
            "appendonly no",
            f'dir "{self.folder.resolve()}"',
            f'logfile "{self.folder.resolve() / "redis.log"}"',
            "maxmemory-policy noeviction",
            "daemonize no",
        ]
        if roles:
            password = self._write_roles()
            lines.append(f'aclfile "{self.folder.resolve() / "users.acl"}"')
        else:
            password = secrets.token_urlsafe(24)
            lines.append(f"requirepass {password}")
        _write_private(self.password_file(), password + "\n")
        _write_private(self.folder / "redis.conf", "\n".join(lines) + "\n")
        user = "admin@" if roles else ""
        connection = StartedServer(url=f"redis://{user}127.0.0.1:{port}", password=password)
        _write_private(self.connection_file, json.dumps(connection) + "\n")

    def _write_roles(self) -> str:
        """Write a user and a password file for each role, and return the admin's password."""
        passwords = {role: secrets.token_urlsafe(24) for role in ROLES}
        users = [f"user {role} on >{passwords[role]} {rules}" for role, rules in ROLES.items()]
        _write_private(self.folder / "users.acl", "\n".join(["user default off", *users]) + "\n")
        for role, password in passwords.items():
            _write_private(self.password_file(role), password + "\n")
        return passwords["admin"]

    @property
    def address(self) -> Address:
        """Address of the server, with the password."""
        try:
            known: StartedServer = json.loads(self.connection_file.read_text())
            user, _, place = known["url"].removeprefix("redis://").rpartition("@")
            host, _, port = place.partition(":")
            return Address("redis", host, int(port), user=user, password=known["password"])
        except FileNotFoundError:
            raise UsageError("no server was started on this machine. To start one: shoal redis start") from None

    def launch(self, detached: bool) -> subprocess.Popen[bytes]:
        """Start the server and wait until it answers. A detached server outlives this process."""
        program = shutil.which("redis-server")
        if program is None:
            raise UsageError("redis-server is not installed. On Debian or Ubuntu: apt-get install redis-server")
        command = [program, str(self.folder / "redis.conf")]
        process = subprocess.Popen(
            command if detached else mortal(command),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=detached,
        )  # fmt: skip
        deadline = time.monotonic() + _START_WITHIN
        while not self.running():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise UsageError(f"redis-server did not start: {self._last_log_line()}")
            time.sleep(0.02)
        return process

    def _last_log_line(self) -> str:
        log = self.folder / "redis.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "its log is empty"

    def running(self) -> bool:
        """Whether the server answers."""
        if not self.connection_file.exists():
            return False
        connection = self.address.open(1.0)
        import redis

        try:
            return bool(connection.ping())
        except (redis.RedisError, OSError):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """Stop the server, and remove its settings and passwords."""
        connection = self.address.open(5.0)
        import redis

        try:
            connection.shutdown(nosave=True)
        except (redis.RedisError, OSError) as error:
            raise UsageError(f"the server at {self.address.url} does not answer ({error})") from None
        finally:
            connection.close()
        for name in ("connection.json", "redis.conf", "users.acl", "password", *(f"{role}.password" for role in ROLES)):
            (self.folder / name).unlink(missing_ok=True)


def flush(connection: redis.Redis) -> int:
    """Remove Shoal's keys and no others, and return their number. Heads and workers connect again by themselves."""
    keys = list(connection.scan_iter(match=f"{PREFIX}*", count=1000))
    for start in range(0, len(keys), 1000):
        connection.delete(*keys[start : start + 1000])
    return len(keys)


def free_port() -> int:
    """Find a port of the loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _write_private(path: Path, content: str) -> None:
    """Write a file that at no moment another user can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
