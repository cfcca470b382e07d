"""Where a Redis server is, and the secrets to get in.

Secrets come from files or the environment. An address that was typed or stored has none: what is typed is in the
process list for everybody to read, and what is stored is in the run's folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from shoal.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import redis

SCHEMES = ("redis", "rediss", "unix")
PORT = 6379
_OPTIONS = ("password_file", "ca_file", "key_file")
_FEWEST_KEY_BYTES = 16
_READ_SIZE = 2**20  # bytes at once: results are large


@dataclass(frozen=True)
class Address:
    """A server, and how to get in. Printing it shows no secret."""

    scheme: str
    host: str
    port: int = PORT
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    key: bytes = field(default=b"", repr=False)
    """What messages are signed with; nothing signs none."""
    options: str = ""
    """The part of the address after `?`: names of files, not what is in them."""

    @property
    def url(self) -> str:
        """What to type to get to the same server; without secrets."""
        user = f"{self.user}@" if self.user else ""
        place = self.host if self.scheme == "unix" else f"{self.host}:{self.port}"
        database = f"/{self.database}" if self.database else ""
        return f"{self.scheme}://{user}{place}{database}{self.options}"

    def open(self, timeout: float) -> redis.Redis:
        """A connection that waits for no answer longer than `timeout` seconds. It is made when it is first used."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingExtra(
                "the redis engine needs redis-py. To install it, type: pip install 'shoal[redis]'"
            ) from None
        options: dict[str, Any] = {
            "db": self.database,
            "username": self.user or None,
            "password": self.password or None,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),  # a command that failed may have been carried out: that is for us to judge
            "max_connections": 1,
        }
        options |= {"unix_socket_path": self.host} if self.scheme == "unix" else {"host": self.host, "port": self.port}
        if self.scheme == "rediss":
            options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
            options |= {"ssl_ca_certs": self.ca_file} if self.ca_file else {}
        link = redis.Redis(**options)
        link.connection_pool.connection_kwargs["socket_read_size"] = _READ_SIZE
        return link


def problems(address: str) -> list[str]:
    """What is wrong with an address that was typed; files that it names are not opened."""
    try:
        parts = urlsplit(_with_scheme(address))
        port = parts.port
    except ValueError:  # whose message may hold a piece of a password
        return ["that is not the address of a Redis server: its port is not a number. Use redis://HOST:PORT"]
    shown = f"{parts.scheme}://{parts.hostname or ''}{f':{port}' if port else ''}{parts.path}"
    found = []
    if parts.scheme not in SCHEMES:
        found.append(f"{shown} is not the address of a Redis server: it begins with {' or '.join(SCHEMES)}")
    elif parts.scheme == "unix" and not parts.path.startswith("/"):
        found.append(f"{shown} has no path: a socket's address is unix:///run/redis/redis.sock")
    elif parts.scheme != "unix" and not parts.hostname:
        found.append(f"{shown} has no host. Use redis://HOST:PORT")
    elif parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdigit():
        found.append(f"{shown} ends in {parts.path!r}, which is not the number of a database")
    if parts.password:
        found.append(
            f"the address {shown} has a password in it, which everybody on this machine can read in the process list. "
            f"Put the password into a file that only you can read, and type: {parts.scheme}://"
            f"{f'{parts.username}@' if parts.username else ''}{parts.hostname or ''}{f':{port}' if port else ''}"
            f"{parts.path}?password_file=FILE"
        )
    unknown = [name for name, _ in parse_qsl(parts.query) if name not in _OPTIONS]
    if unknown:
        found.append(f"{shown} has the options {', '.join(unknown)}; there are only {', '.join(_OPTIONS)}")
    return found


def find(
    address: str | None, environ: Mapping[str, str] = os.environ, *, files: Mapping[str, str] | None = None
) -> Address:
    """The server that is meant: the one typed, SHOAL_REDIS_URL, or the one that `shoal redis start` started.

    `files` names password_file, ca_file and key_file where they were given apart from the address.
    """
    if address is None and "SHOAL_REDIS_URL" in environ:
        parts = urlsplit(environ["SHOAL_REDIS_URL"])
        wrong = problems(parts._replace(netloc=re.sub(r":[^@]*@", "@", parts.netloc)).geturl())
        if wrong:
            raise UsageError([f"SHOAL_REDIS_URL: {problem}" for problem in wrong])
        return _complete(parts, environ, files or {}, password=unquote(parts.password or ""))
    if address is None:
        started = connection_file(environ)
        if not started.exists():
            raise UsageError(
                "there is no Redis server to work with. Start one on this machine with: shoal redis start; "
                "or say where it is: redis://HOST:PORT"
            )
        address = json.loads(started.read_text())["url"]
    wrong = problems(address)
    if wrong:
        raise UsageError(wrong)
    return _complete(urlsplit(_with_scheme(address)), environ, files or {})


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"redis://{address}"


def _complete(parts: SplitResult, environ: Mapping[str, str], files: Mapping[str, str], password: str = "") -> Address:
    named = dict(parse_qsl(parts.query)) | {name: value for name, value in files.items() if value}
    unix = parts.scheme == "unix"
    base = Address(
        parts.scheme,
        unquote(parts.path) if unix else parts.hostname or "",
        0 if unix else parts.port or PORT,
        0 if unix else int(parts.path.strip("/") or 0),
        unquote(parts.username or ""),
        options=f"?{parts.query}" if parts.query else "",
    )
    if not password:
        password = _password(base, named.get("password_file"), environ)
    key_file = named.get("key_file") or environ.get("SHOAL_KEY_FILE")
    key = b"" if not key_file else _secret(key_file, "key").encode()
    if key and len(key) < _FEWEST_KEY_BYTES:
        raise UsageError(f"the key in {key_file} has {len(key)} bytes; it must have at least {_FEWEST_KEY_BYTES}")
    ca_file = named.get("ca_file") or environ.get("SHOAL_REDIS_CA_FILE", "")
    if ca_file and not Path(ca_file).is_file():
        raise UsageError(f"there is no file of certificates {ca_file}")
    kept = {name: getattr(base, name) for name in ("scheme", "host", "port", "database", "user", "options")}
    return Address(**kept, password=password, ca_file=ca_file, key=key)


def _password(base: Address, file: str | None, environ: Mapping[str, str]) -> str:
    if file or environ.get("SHOAL_REDIS_PASSWORD_FILE"):
        return _secret(file or environ["SHOAL_REDIS_PASSWORD_FILE"], "password")
    if "SHOAL_REDIS_PASSWORD" in environ:
        return environ["SHOAL_REDIS_PASSWORD"]
    started = connection_file(environ)
    if started.exists():  # the server that `shoal redis start` started: its password is known here
        known = json.loads(started.read_text())
        if _same(known["url"], base):
            return str(known["password"])
    return ""


def _same(url: str, base: Address) -> bool:
    """Whether two addresses are of one server, as the same user."""
    parts = urlsplit(url)
    local = {"localhost": "127.0.0.1"}
    host, port = parts.hostname or "", parts.port or PORT
    mine = (local.get(base.host, base.host), base.port, base.user)
    return base.scheme == "redis" and mine == (local.get(host, host), port, parts.username or "")


def _secret(file: str, what: str) -> str:
    """What is in a file that nobody else may read."""
    try:
        mode = Path(file).stat().st_mode
        content = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the {what} cannot be read from {file}: {error}") from None
    if mode & 0o077:
        raise UsageError(f"others can read the {what} in {file}. To change that, type: chmod 600 {file}")
    if not content:
        raise UsageError(f"there is no {what} in {file}: it is empty")
    return content


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's server keeps its files."""
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "shoal" / "redis"


def connection_file(environ: Mapping[str, str] = os.environ) -> Path:
    """What `shoal redis start` writes: address and password of the server that it started."""
    return folder(environ) / "connection.json"


def cannot_reach(server: Address, error: Exception) -> str:
    """Why a server is out of reach, and what to do."""
    text = str(error)
    if "permission" in text.lower():
        return f"the user of {server.url} may not do on the server what Shoal needs: {text}"
    if "auth" in text.lower() or "WRONGPASS" in text:
        return (
            f"the Redis server at {server.url} does not let this user in ({text}). Put the password into a file that "
            f"only you can read, and add ?password_file=FILE to the address, or set SHOAL_REDIS_PASSWORD_FILE"
        )
    return f"there is no Redis server at {server.url} ({text}). To start one on this machine, type: shoal redis start"
