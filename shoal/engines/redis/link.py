"""The link of a head or of a machine to its Redis server.

A link has two connections: a thread blocks on the inbox with one, and the owner's thread writes with the other. When
either fails, or the owner finds that its record is gone, the session is over and all of it is void; the link then
connects again, with growing pauses, and begins another session (docs/decisions/0010).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from shoal.base.backoff import Backoff
from shoal.engines.redis.address import Address
from shoal.engines.redis.envelope import Refusals
from shoal.engines.redis.records import HeadRecord, MachineRecord, Registry

if TYPE_CHECKING:
    import redis

log = logging.getLogger("shoal.redis")

TIMEOUT = 5.0
"""Seconds without an answer from the server after which a connection counts as lost."""
KEPT = 120.0
"""Seconds until messages and shared values expire unless they are taken or renewed."""
_AT_ONCE = 63  # messages that are taken together, in addition to the first
_PAUSES = (0.1, 2.0)  # seconds between attempts to connect: the first, and the longest


class ServerLost(Exception):
    """The server answers, but no longer has what it was given."""


class Write(NamedTuple):
    """A change to one key: append to a list, set a value, extend the life of a value, or delete it."""

    command: Literal["push", "set", "renew", "delete"]
    key: str
    content: bytes = b""


class LinkOwner(Protocol):
    """A head or a machine, as its link sees it."""

    def begin(self) -> str:
        """Register with a server that has just answered, and return the key of the inbox."""

    def exchange(self) -> None:
        """Send messages and renew the record until the owner ends, with a `Link.check` now and after `interrupt`."""

    def receive(self, contents: Sequence[bytes]) -> None:
        """Take messages from the inbox. Called by the link's thread."""

    def interrupt(self) -> None:
        """Make `exchange` call `Link.check` soon. Called by the link's thread."""

    def lost(self, error: Exception) -> None:
        """Clean up after a session; raise if another attempt is useless."""

    def rest(self, seconds: float) -> bool:
        """Wait before the next attempt; False if there should be none."""


class Link:
    """Keeps its owner connected to a server, one session after another."""

    def __init__(self, server: Address, timeout: float, owner: LinkOwner) -> None:
        self._server, self._timeout, self._owner = server, timeout, owner
        self._listener: threading.Thread | None = None
        self._failure: Exception | None = None
        self._inbox = ""  # empty outside a session
        self.refusals = Refusals()
        self._open()

    def _open(self) -> None:
        self.connection = self._server.open(self._timeout)
        self.registry = Registry(self.connection, self._server.key, self.refusals)

    def run(self) -> None:
        """Hold sessions until the owner ends. `close` must follow, after `farewell` where that is due."""
        import redis

        pauses = Backoff(*_PAUSES)
        while True:
            try:
                self._session(pauses)
                return
            except (redis.RedisError, OSError, ServerLost) as error:
                self._inbox = ""
                self.close()  # nothing of this session may arrive after `lost`
                self._owner.lost(error)
            if not self._owner.rest(pauses.next()):
                return
            self._open()

    def _session(self, pauses: Backoff) -> None:
        stop = threading.Event()
        self._failure = None
        try:
            self.connection.ping()
            self._inbox = self._owner.begin()
            pauses.reset()
            self._listener = threading.Thread(
                target=self._listen, args=(self._inbox, stop), name="shoal-redis-inbox", daemon=True
            )
            self._listener.start()
            self._owner.exchange()
        finally:
            stop.set()
            self.connection.close()

    def _listen(self, inbox: str, stop: threading.Event) -> None:
        connection = self._server.open(self._timeout)
        try:
            while not stop.is_set():
                contents = _take(connection, inbox, min(1.0, self._timeout / 2))
                if contents and not stop.is_set():
                    self._owner.receive(contents)
        except Exception as error:  # `check` raises it in the owner's thread
            self._failure = error
            if not stop.is_set():
                self._owner.interrupt()
        finally:
            connection.close()

    def check(self) -> None:
        """Raise the error that ended the thread that listens, if there was one."""
        if self._failure is not None:
            raise self._failure

    def write(self, writes: Iterable[Write]) -> None:
        """Carry out changes in one round trip."""
        kept = int(KEPT * 1000)
        pipe = self.connection.pipeline(transaction=False)
        for command, key, content in writes:
            if command == "push":
                pipe.rpush(key, content)
                pipe.pexpire(key, kept)
            elif command == "set":
                pipe.set(key, content, px=kept)
            elif command == "renew":
                pipe.pexpire(key, kept)
            else:
                pipe.delete(key)
        if len(pipe):
            pipe.execute()

    def farewell(self, record: HeadRecord | MachineRecord, writes: Iterable[Write]) -> None:
        """After `run`, if it ended in a session: remove the record and the inbox, and send the last messages.

        Uses a new connection, because a signal may have interrupted a command on the old one.
        """
        import redis

        if not self._inbox:
            return
        self._open()
        try:
            self.registry.remove(record)
            # The empty message ends the wait of the thread that listens.
            self.write([*writes, Write("push", self._inbox), Write("delete", self._inbox)])
        except (redis.RedisError, OSError) as error:
            log.warning(
                "could not sign off from Redis at %s (%s); the record expires in %g s",
                self._server.url, error, record.lease,
            )  # fmt: skip
        finally:
            self.connection.close()

    def close(self) -> None:
        """Wait for the end of the thread that listens."""
        if self._listener is not None:
            self._listener.join()
            self._listener = None


def _take(connection: redis.Redis, key: str, timeout: float) -> list[bytes]:
    """Take messages from a list in one round trip, waiting at most `timeout` seconds for the first."""
    pipe = connection.pipeline(transaction=False)
    pipe.blpop([key], timeout)
    pipe.lpop(key, _AT_ONCE)
    first, more = pipe.execute()
    return [] if first is None else [first[1], *(more or [])]


def is_refused(error: Exception) -> bool:
    """Whether the server answers but does not accept this user, so that the settings have to change."""
    import redis

    return isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError)
