"""The link to a Redis server, on a pretended server: sessions, losses, pauses, and how it ends."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import redis

from shoal.engines.redis.address import Address
from shoal.engines.redis.link import Link, ServerLost, Write, is_refused
from shoal.engines.redis.records import HeadRecord

RECORD = HeadRecord("run", 1, 1, 1, True, 0, 10.0, "host", 1, "0")


class FakeServer:
    """Stands for an `Address`, its connections and their pipelines. `failures` are raised by the next pings."""

    key, url = b"", "redis://fake"

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        self.failures = list(failures)
        self.inbox: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self.commands: list[tuple[Any, ...]] = []

    def open(self, timeout: float) -> "FakeServer":
        return self

    def close(self) -> None:
        pass

    def ping(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def pipeline(self, transaction: bool) -> "FakePipeline":
        return FakePipeline(self)


class FakePipeline:
    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._commands: list[tuple[Any, ...]] = []

    def __getattr__(self, command: str) -> Any:
        return lambda *arguments, **options: self._commands.append((command, *arguments))

    def __len__(self) -> int:
        return len(self._commands)

    def execute(self) -> list[Any]:
        if self._commands[0][0] == "blpop":
            try:
                content = self._server.inbox.get(timeout=0.01)
            except queue.Empty:
                return [None, None]
            if isinstance(content, Exception):
                raise content
            return [(b"inbox", content), None]
        self._server.commands += self._commands
        return [1] * len(self._commands)


@dataclass
class Inbox:
    content: bytes | Exception = b"the end"


class Owner:
    """Ends each session with the next of `ends`: it raises an error, or waits for what `Inbox` puts there."""

    def __init__(self, server: FakeServer, ends: Sequence["Exception | Inbox"]) -> None:
        self.link = Link(cast(Address, server), 5.0, self)
        self.server = server
        self.ends = list(ends)
        self.received: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.sessions = 0
        self.losses: list[str] = []
        self.rests: list[float] = []

    def begin(self) -> str:
        self.sessions += 1
        if isinstance(self.ends[0], Inbox):
            self.server.inbox.put(self.ends[0].content)
        return f"inbox{self.sessions}"

    def exchange(self) -> None:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        self.received.get(timeout=10)
        self.link.check()

    def receive(self, contents: Sequence[bytes]) -> None:
        if contents == [b"a bug"]:
            raise ZeroDivisionError
        for content in contents:
            self.received.put(content)

    def interrupt(self) -> None:
        self.received.put(None)

    def lost(self, error: Exception) -> None:
        self.losses.append(str(error))

    def rest(self, seconds: float) -> bool:
        self.rests.append(seconds)
        return len(self.rests) < 10


def listeners() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "shoal-redis-inbox"]


def test_pauses_grow_until_a_session_begins() -> None:
    server = FakeServer([redis.ConnectionError("down")] * 3)
    owner = Owner(server, [ServerLost("flushed"), OSError("reset"), Inbox()])
    owner.link.run()
    owner.link.close()
    assert owner.losses == ["down"] * 3 + ["flushed", "reset"]
    assert owner.rests == [0.1, 0.2, 0.4, 0.1, 0.1]
    assert owner.sessions == 3


def test_pauses_have_a_limit_and_the_owner_gives_up() -> None:
    owner = Owner(FakeServer([redis.ConnectionError("down")] * 20), [])
    owner.link.run()
    assert max(owner.rests) == 2.0
    assert owner.sessions == 0


def test_a_lost_inbox_ends_the_session() -> None:
    owner = Owner(FakeServer(), [Inbox(redis.TimeoutError("black hole")), Inbox()])
    owner.link.run()
    owner.link.close()
    assert owner.losses == ["black hole"]
    assert owner.sessions == 2


def test_an_error_in_the_thread_that_listens_reaches_the_owner() -> None:
    owner = Owner(FakeServer(), [Inbox(b"a bug")])
    with pytest.raises(ZeroDivisionError):
        owner.link.run()
    owner.link.close()
    assert owner.losses == []
    assert listeners() == []


def test_farewell_only_in_a_session() -> None:
    server = FakeServer()
    owner = Owner(server, [ServerLost("flushed"), Inbox()])
    owner.link.farewell(RECORD, [])
    assert server.commands == []
    owner.link.run()
    owner.link.farewell(RECORD, [Write("push", "last", b"words")])
    owner.link.close()
    keys = [command[:2] for command in server.commands]
    assert keys[:4] == [("delete", "shoal:run:run"), ("srem", "shoal:runs"), ("rpush", "last"), ("pexpire", "last")]
    assert keys[-1] == ("delete", "inbox2")
    assert listeners() == []


def test_refused_logins() -> None:
    assert is_refused(redis.AuthenticationError("WRONGPASS"))
    assert is_refused(redis.exceptions.NoPermissionError("NOPERM"))
    assert not is_refused(redis.ConnectionError("down"))
