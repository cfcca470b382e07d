"""A Redis server on this machine with safe settings: loopback, a password, nothing on disk but its own few files."""

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
from shoal.engines.redis.address import Address
from shoal.errors import UsageError

if TYPE_CHECKING:
    import redis

ROLES = {
    # What each may do, as Redis spells it. Nobody but the admin gets scripts, settings or other keys than Shoal's.
    "head": "~shoal:* -@all +ping +hello +auth +select +incrby +set +get +mget +del +rpush +blpop +lpop "
    "+pexpire +sadd +srem +smembers",
    "worker": "~shoal:machine:* ~shoal:to:* ~shoal:head:* ~shoal:runs ~shoal:machines %R~shoal:run:* %R~shoal:share:* "
    "-@all +ping +hello +auth +select +set +get +mget +del +rpush +blpop +lpop +pexpire +sadd +srem "
    "+smembers",
    "admin": "~* &* +@all",
}
_START_WITHIN = 10.0  # seconds
# Linux: a program that the kernel kills when its parent dies.


@dataclass(frozen=True)
class Local:
    """A server whose files are in a folder that only this user can read."""

    folder: Path

    @property
    def connection_file(self) -> Path:
        """Address and password, for whoever may read it."""
        return self.folder / "connection.json"

    def password_file(self, role: str = "") -> Path:
        """The password alone; of a role, where there are roles."""
        return self.folder / (f"{role}.password" if role else "password")

    def configure(self, port: int | None = None, roles: bool = False) -> None:
        """Write settings with new passwords."""
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
        password = secrets.token_urlsafe(24)
        if roles:
            users = ["user default off"]
            for role, rules in ROLES.items():
                own = secrets.token_urlsafe(24)
                users.append(f"user {role} on >{own} {rules}")
                _write_private(self.password_file(role), own + "\n")
                password = own  # the admin's, which is last
            _write_private(self.folder / "users.acl", "\n".join(users) + "\n")
            lines.append(f'aclfile "{self.folder.resolve() / "users.acl"}"')
        else:
            lines.append(f"requirepass {password}")
        _write_private(self.password_file(), password + "\n")
        _write_private(self.folder / "redis.conf", "\n".join(lines) + "\n")
        user = "admin@" if roles else ""
        connection = {"url": f"redis://{user}127.0.0.1:{port}", "password": password}
        _write_private(self.connection_file, json.dumps(connection) + "\n")

    @property
    def address(self) -> Address:
        """The server, with the password."""
        try:
            known = json.loads(self.connection_file.read_text())
            user, _, place = known["url"].removeprefix("redis://").rpartition("@")
            host, _, port = place.partition(":")
            return Address("redis", host, int(port), user=user, password=known["password"])
        except FileNotFoundError:
            raise UsageError("no server was started here. To start one, type: shoal redis start") from None

    def launch(self, detached: bool) -> subprocess.Popen[bytes]:
        """Start the server and wait until it answers. A detached one lives on when this process ends."""
        program = shutil.which("redis-server")
        if program is None:
            raise UsageError("redis-server is not installed. On Debian or Ubuntu, type: apt-get install redis-server")
        command = [program, str(self.folder / "redis.conf")]
        process = subprocess.Popen(
            command if detached else mortal(command),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=detached,
        )  # fmt: skip
        import redis

        deadline = time.monotonic() + _START_WITHIN
        while True:
            link = self.address.open(1.0)
            try:
                if link.ping():
                    return process
            except (redis.RedisError, OSError):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    raise UsageError(f"redis-server did not start: {self._last_words()}") from None
                time.sleep(0.02)
            finally:
                link.close()

    def _last_words(self) -> str:
        log = self.folder / "redis.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "it said nothing"

    def running(self) -> bool:
        """Whether it answers."""
        import redis

        if not self.connection_file.exists():
            return False
        link = self.address.open(1.0)
        try:
            return bool(link.ping())
        except (redis.RedisError, OSError):
            return False
        finally:
            link.close()

    def stop(self) -> None:
        """End the server, and remove what only it could read."""
        import redis

        link = self.address.open(5.0)
        try:
            link.shutdown(nosave=True)
        except (redis.RedisError, OSError) as error:
            raise UsageError(f"the server at {self.address.url} does not answer ({error})") from None
        finally:
            link.close()
        for name in ("connection.json", "redis.conf", "users.acl", "password", *(f"{role}.password" for role in ROLES)):
            (self.folder / name).unlink(missing_ok=True)


def flush(link: redis.Redis) -> int:
    """Remove all of Shoal's keys, and nobody else's; how many there were. Heads and workers begin anew."""
    names = list(link.scan_iter(match="shoal:*", count=1000))
    for start in range(0, len(names), 1000):
        link.delete(*names[start : start + 1000])
    return len(names)


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _write_private(path: Path, content: str) -> None:
    """Nobody else may read it, not even for a moment."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
