"""Where a Redis server is, and the secrets to log in.

Secrets come from files or environment variables. An address from a command line or a run's folder has none: all users
of a machine can read the process list, and run folders are shared.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from shoal.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import redis

SCHEMES = ("redis", "rediss", "unix")
PORT = 6379
_OPTIONS = ("password_file", "ca_file", "key_file")
_FEWEST_KEY_BYTES = 16
_READ_SIZE = 2**20  # bytes per read: results are large


class StartedServer(TypedDict):
    """Content of connection.json, which `shoal redis start` writes."""

    url: str
    password: str


@dataclass(frozen=True)
class Address:
    """A server, and how to log in. Its repr shows no secret."""

    scheme: str
    host: str
    """Host name, or the path of a socket."""
    port: int = PORT
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    key: bytes = field(default=b"", repr=False)
    """Key that signs messages; empty for unsigned messages."""
    options: str = ""
    """The part of the address after `?`: names of files, not their contents."""

    @property
    def url(self) -> str:
        """Address for a command line that leads to the same server; without secrets."""
        user = f"{self.user}@" if self.user else ""
        place = self.host if self.scheme == "unix" else f"{self.host}:{self.port}"
        database = f"/{self.database}" if self.database else ""
        return f"{self.scheme}://{user}{place}{database}{self.options}"

    def open(self, timeout: float) -> redis.Redis:
        """Make a client that waits at most `timeout` seconds for an answer. It connects when it is first used."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingExtra("the redis engine needs redis-py. Install it: pip install 'shoal[redis]'") from None
        options: dict[str, Any] = {
            "db": self.database,
            "username": self.user or None,
            "password": self.password or None,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "socket_keepalive": True,
            # A command that failed may have been carried out: whether to repeat it is decided elsewhere.
            "retry": Retry(NoBackoff(), 0),
            "max_connections": 1,
        }
        options |= {"unix_socket_path": self.host} if self.scheme == "unix" else {"host": self.host, "port": self.port}
        if self.scheme == "rediss":
            options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
            options |= {"ssl_ca_certs": self.ca_file} if self.ca_file else {}
        client = redis.Redis(**options)
        client.connection_pool.connection_kwargs["socket_read_size"] = _READ_SIZE
        return client


# Addresses as text ---------------------------------------------------------------------------------------------


def address_problems(address: str) -> list[str]:
    """List what is wrong with an address from a command line. Files that it names are not opened."""
    try:
        parts = urlsplit(_with_scheme(address))
        shown = _shown(parts)
    except ValueError:  # its message may quote a part of a password
        return ["not the address of a Redis server: the port is not a number. Use redis://HOST:PORT"]
    found = [_place_problem(parts, shown), _password_problem(parts, shown), _options_problem(parts, shown)]
    return [problem for problem in found if problem]


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"redis://{address}"


def _shown(parts: SplitResult, user: str = "") -> str:
    """Write an address without secrets and options; ValueError if its port is not a number."""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{user}{parts.hostname or ''}{port}{parts.path}"


def _place_problem(parts: SplitResult, shown: str) -> str:
    if parts.scheme not in SCHEMES:
        return f"{shown} is not the address of a Redis server, which begins with {' or '.join(SCHEMES)}"
    if parts.scheme == "unix":
        return "" if parts.path.startswith("/") else f"{shown} has no path. Use unix:///PATH/TO/redis.sock"
    if not parts.hostname:
        return f"{shown} has no host. Use redis://HOST:PORT"
    database = parts.path.strip("/")
    if database and not database.isdigit():
        return f"{shown} ends in {parts.path!r}, which is not the number of a database"
    return ""


def _password_problem(parts: SplitResult, shown: str) -> str:
    if not parts.password:
        return ""
    without = _shown(parts, f"{parts.username}@" if parts.username else "")
    return (
        f"the address {shown} contains a password, which all users of this machine can read in the process list. "
        f"Write the password to a file that only you can read, and use: {without}?password_file=FILE"
    )


def _options_problem(parts: SplitResult, shown: str) -> str:
    unknown = [name for name, _ in parse_qsl(parts.query) if name not in _OPTIONS]
    return f"{shown} has unknown options: {', '.join(unknown)}. Options: {', '.join(_OPTIONS)}" if unknown else ""


# From text to a server, with its secrets -----------------------------------------------------------------------


def find_server(
    address: str | None, environ: Mapping[str, str] = os.environ, *, files: Mapping[str, str] | None = None
) -> Address:
    """Find the server to use: `address`, SHOAL_REDIS_URL, or the server that `shoal redis start` started.

    `files` names password_file, ca_file and key_file where they were given separately from the address.
    """
    if address is None and "SHOAL_REDIS_URL" in environ:
        parts = urlsplit(environ["SHOAL_REDIS_URL"])
        problems = address_problems(parts._replace(netloc=re.sub(r":[^@]*@", "@", parts.netloc)).geturl())
        if problems:
            raise UsageError([f"SHOAL_REDIS_URL: {problem}" for problem in problems])
        return _with_secrets(parts, environ, files or {}, password=unquote(parts.password or ""))
    if address is None:
        started = started_server(environ)
        if started is None:
            raise UsageError(
                "no Redis server is known. Start one on this machine with `shoal redis start`, or name one: "
                "redis://HOST:PORT"
            )
        address = started["url"]
    problems = address_problems(address)
    if problems:
        raise UsageError(problems)
    return _with_secrets(urlsplit(_with_scheme(address)), environ, files or {})


def _with_secrets(
    parts: SplitResult, environ: Mapping[str, str], files: Mapping[str, str], password: str = ""
) -> Address:
    """Add to an address without problems what files and variables hold."""
    named = dict(parse_qsl(parts.query)) | {name: file for name, file in files.items() if file}
    server = _without_secrets(parts)
    return dataclasses.replace(
        server,
        password=password or _password(server, named.get("password_file"), environ),
        key=_key(named.get("key_file") or environ.get("SHOAL_KEY_FILE")),
        ca_file=_ca_file(named.get("ca_file") or environ.get("SHOAL_REDIS_CA_FILE", "")),
    )


def _without_secrets(parts: SplitResult) -> Address:
    user = unquote(parts.username or "")
    options = f"?{parts.query}" if parts.query else ""
    if parts.scheme == "unix":
        return Address("unix", unquote(parts.path), port=0, user=user, options=options)
    database = int(parts.path.strip("/") or 0)
    return Address(parts.scheme, parts.hostname or "", parts.port or PORT, database, user, options=options)


def _password(server: Address, file: str | None, environ: Mapping[str, str]) -> str:
    file = file or environ.get("SHOAL_REDIS_PASSWORD_FILE")
    if file:
        return _secret(file, "password")
    if "SHOAL_REDIS_PASSWORD" in environ:
        return environ["SHOAL_REDIS_PASSWORD"]
    started = started_server(environ)
    if started is not None and _is_same(started["url"], server):
        return started["password"]
    return ""


def _key(file: str | None) -> bytes:
    if not file:
        return b""
    key = _secret(file, "key").encode()
    if len(key) < _FEWEST_KEY_BYTES:
        raise UsageError(f"the key in {file} has {len(key)} bytes; it must have at least {_FEWEST_KEY_BYTES}")
    return key


def _ca_file(file: str) -> str:
    if file and not Path(file).is_file():
        raise UsageError(f"the file of CA certificates {file} does not exist")
    return file


def _is_same(url: str, server: Address) -> bool:
    """Whether a URL leads to a server as the same user."""
    parts = urlsplit(url)
    loopback = {"localhost": "127.0.0.1"}
    host, port = parts.hostname or "", parts.port or PORT
    other = (loopback.get(host, host), port, parts.username or "")
    return server.scheme == "redis" and other == (loopback.get(server.host, server.host), server.port, server.user)


def _secret(file: str, what: str) -> str:
    """Read a file that only this user may read."""
    try:
        mode = Path(file).stat().st_mode
        content = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the {what} cannot be read from {file}: {error}") from None
    if mode & 0o077:
        raise UsageError(f"other users can read the {what} in {file}. Run: chmod 600 {file}")
    if not content:
        raise UsageError(f"the {what} file {file} is empty")
    return content


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for the files of the server that `shoal redis start` starts for this user."""
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "shoal" / "redis"


def connection_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Path of the file with a `StartedServer`."""
    return state_folder(environ) / "connection.json"


def started_server(environ: Mapping[str, str] = os.environ) -> StartedServer | None:
    """Read what `shoal redis start` wrote; None if it started no server."""
    path = connection_file(environ)
    return cast(StartedServer, json.loads(path.read_text())) if path.exists() else None


def cannot_reach(server: Address, error: Exception) -> str:
    """Explain why a server cannot be used, and what to do."""
    text = str(error)
    if "permission" in text.lower():
        return f"the user of {server.url} lacks a permission that Shoal needs on the server: {text}"
    if "auth" in text.lower() or "WRONGPASS" in text:
        return (
            f"the Redis server at {server.url} rejected the login ({text}). Write the password to a file that only you "
            f"can read, and add ?password_file=FILE to the address or set SHOAL_REDIS_PASSWORD_FILE"
        )
    return f"no Redis server answers at {server.url} ({text}). To start one on this machine: shoal redis start"
