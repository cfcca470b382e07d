"""The names of Shoal's keys in Redis, and the records under which heads and machines are found there.

A record expires unless its owner renews it. Reading one that is a moment old can at worst move a worker that need not
have moved, which never changes a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from shoal.engines.redis.envelope import PREFIX, Refusals, seal, unseal
from shoal.errors import WireError

if TYPE_CHECKING:
    import redis

LEASE = 10.0
"""Seconds until a record expires unless it is renewed; a head may choose another lease."""
RUNS, MACHINES, ORDERS = f"{PREFIX}runs", f"{PREFIX}machines", f"{PREFIX}orders"
"""The sets of ids of all runs and of all machines, and the counter from which runs get their order."""


def run_key(run: str) -> str:
    """Key of the record of a run's head."""
    return f"{PREFIX}run:{run}"


def machine_key(machine: str) -> str:
    """Key of a machine's record."""
    return f"{PREFIX}machine:{machine}"


def head_inbox(run: str, epoch: int) -> str:
    """Key of the list of messages to a head."""
    return f"{PREFIX}head:{run}:{epoch}"


def machine_inbox(machine: str) -> str:
    """Key of the list of messages to a machine."""
    return f"{PREFIX}to:{machine}"


def share_key(run: str, epoch: int, number: int) -> str:
    """Key of a shared value."""
    return f"{PREFIX}share:{run}:{epoch}:{number}"


class HeadRecord(msgspec.Struct, frozen=True):
    """The head of a run, as machines see it."""

    id: str
    """Id of the run."""
    epoch: int
    order: int
    """Older runs have lower numbers."""
    need: int
    """Number of workers that the head waits for before it starts."""
    started: bool
    have: int
    """Number of workers that it has."""
    lease: float
    """Seconds after which it gives up a silent worker."""
    host: str
    pid: int
    version: str

    index: ClassVar[str] = RUNS

    @property
    def key(self) -> str:
        return run_key(self.id)


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker process of a machine."""

    number: int
    pid: int
    run: str
    """Id of the run it works for; empty while it waits."""
    tasks: int
    """Number of tasks it has finished."""


class MachineRecord(msgspec.Struct, frozen=True):
    """A machine that offers workers, as heads and other machines see it."""

    id: str
    host: str
    pid: int
    """The supervisor's process id."""
    version: str
    workers: list[WorkerRecord]
    starting: int
    """Number of workers that are being started."""
    speed: float
    """Recent tasks per second."""
    refused_by: dict[str, str]
    """Ids of runs that refused this machine, and why."""
    refusals: int
    """Number of messages that this machine refused."""

    index: ClassVar[str] = MACHINES
    lease: ClassVar[float] = LEASE

    @property
    def key(self) -> str:
        return machine_key(self.id)


R = TypeVar("R", HeadRecord, MachineRecord)


class Registry:
    """All records on one server."""

    def __init__(self, connection: redis.Redis, key: bytes, refusals: Refusals) -> None:
        self._connection, self._key, self._refusals = connection, key, refusals

    def heads(self) -> list[HeadRecord]:
        """Read the records of all heads, oldest run first."""
        return sorted(self._read(HeadRecord, run_key), key=lambda head: (head.order, head.id))

    def machines(self) -> list[MachineRecord]:
        """Read the records of all machines, sorted by id."""
        return sorted(self._read(MachineRecord, machine_key), key=lambda machine: machine.id)

    def _read(self, kind: type[R], key_of: Callable[[str], str]) -> list[R]:
        members: Any = self._connection.smembers(kind.index)
        ids = sorted(member.decode(errors="replace") for member in members)
        if not ids:
            return []
        contents: Any = self._connection.mget([key_of(name) for name in ids])
        expired = [name for name, content in zip(ids, contents, strict=True) if content is None]
        if expired:
            self._connection.srem(kind.index, *expired)
        found = []
        for name, content in zip(ids, contents, strict=True):
            if content is None:
                continue
            try:
                record, _ = unseal(self._key, key_of(name), content, kind)
                if record.id != name:
                    raise WireError(f"a record is stored under another id: that of {record.id} under {name}")
                found.append(record)
            except WireError as error:
                self._refusals.add(key_of(name), error)
        return found

    def write(self, record: HeadRecord | MachineRecord, new: bool) -> bool:
        """Create or renew a record. False if it should be renewed but is gone: the server lost its data."""
        pipe = self._connection.pipeline(transaction=False)
        content = seal(self._key, record.key, record)
        pipe.set(record.key, content, px=max(int(record.lease * 1000), 1), xx=not new)
        pipe.sadd(record.index, record.id)
        return bool(pipe.execute()[0])

    def remove(self, record: HeadRecord | MachineRecord) -> None:
        """Remove a record of a head or machine that ends."""
        pipe = self._connection.pipeline(transaction=False)
        pipe.delete(record.key)
        pipe.srem(record.index, record.id)
        pipe.execute()
