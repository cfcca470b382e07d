"""Lists of messages on a Redis server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import redis

KEPT = 120_000
"""Milliseconds until messages and shared values expire unless they are taken or renewed."""
_AT_ONCE = 63  # messages that are taken together, in addition to the first


def take(connection: redis.Redis, name: str, timeout: float) -> list[bytes]:
    """Take messages from a list in one round trip, waiting at most `timeout` seconds for the first."""
    pipe = connection.pipeline(transaction=False)
    pipe.blpop([name], timeout)
    pipe.lpop(name, _AT_ONCE)
    first, more = pipe.execute()
    return [] if first is None else [first[1], *(more or [])]
