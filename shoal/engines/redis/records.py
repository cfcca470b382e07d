"""Who is there: runs and machines, as records in Redis that vanish unless they are renewed; and who works for whom.

Nobody hands out workers. Every machine reads the same records and computes the same assignment, and acts on its own
part of it. A look at records that are a moment old can only cost a move, which never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shoal.engines.redis.envelope import PREFIX, Refusals, seal, unseal
from shoal.errors import WireError

if TYPE_CHECKING:
    import redis

LEASE = 10.0
"""Seconds that a record lives without being renewed, unless a run says otherwise."""
KEPT = 120_000
"""Milliseconds that messages and shared values stay if nobody takes or renews them."""
_AT_ONCE = 63  # messages that are taken from a list together, beside the first
RUNS, MACHINES, ORDERS = f"{PREFIX}runs", f"{PREFIX}machines", f"{PREFIX}orders"


class Run(msgspec.Struct, frozen=True):
    """A head that has work."""

    id: str
    epoch: int
    order: int
    """Older runs have lower numbers."""
    need: int
    """Workers that it waits for before it starts."""
    started: bool
    have: int
    """Workers that it has."""
    lease: float
    """Seconds after which it gives a silent worker up."""
    host: str
    pid: int
    version: str


class Slot(msgspec.Struct, frozen=True):
    """A worker process on a machine."""

    number: int
    pid: int
    run: str
    """Which run it works for; empty while it waits."""
    tasks: int


class Machine(msgspec.Struct, frozen=True):
    """A machine with workers."""

    id: str
    host: str
    pid: int
    version: str
    slots: list[Slot]
    starting: int
    """Workers that are about to be there."""
    speed: float
    """Tasks per second, lately."""
    beats: int
    """How often this record was renewed."""
    refused_by: dict[str, str]
    """Runs that do not want it, and why."""
    refusals: int
    """Messages that it refused."""


R = TypeVar("R", Run, Machine)


def run_key(run: str) -> str:
    """Where a run's record is."""
    return f"{PREFIX}run:{run}"


def machine_key(machine: str) -> str:
    """Where a machine's record is."""
    return f"{PREFIX}machine:{machine}"


def inbox(run: str, epoch: int) -> str:
    """The list from which a head takes messages."""
    return f"{PREFIX}head:{run}:{epoch}"


def outbox(machine: str) -> str:
    """The list from which a machine takes messages."""
    return f"{PREFIX}to:{machine}"


def share_key(run: str, epoch: int, number: int) -> str:
    """Where a shared value is."""
    return f"{PREFIX}share:{run}:{epoch}:{number}"


def take(link: redis.Redis, name: str, timeout: float) -> list[bytes]:
    """What lies in a list, waiting for the first of it at most so many seconds; all in one round trip."""
    pipe = link.pipeline(transaction=False)
    pipe.blpop([name], timeout)
    pipe.lpop(name, _AT_ONCE)
    first, more = pipe.execute()
    return [] if first is None else [first[1], *(more or [])]


class Fleet:
    """The records of one server."""

    def __init__(self, link: redis.Redis, key: bytes, refusals: Refusals) -> None:
        self._link, self._key, self._refusals = link, key, refusals

    def runs(self) -> list[Run]:
        """Every run that is there, oldest first."""
        found = self._all(RUNS, run_key, Run)
        return sorted(found, key=lambda run: (run.order, run.id))

    def machines(self) -> list[Machine]:
        """Every machine that is there."""
        found = self._all(MACHINES, machine_key, Machine)
        return sorted(found, key=lambda machine: machine.id)

    def _all(self, names: str, key_of: Any, kind: type[R]) -> list[R]:
        members: Any = self._link.smembers(names)
        ids = sorted(member.decode(errors="replace") for member in members)
        if not ids:
            return []
        contents: Any = self._link.mget([key_of(name) for name in ids])
        gone = [name for name, content in zip(ids, contents, strict=True) if content is None]
        if gone:
            self._link.srem(names, *gone)
        found = []
        for name, content in zip(ids, contents, strict=True):
            if content is None:
                continue
            try:
                record, _ = unseal(self._key, key_of(name), content, kind)
                if record.id != name:
                    raise WireError(f"a record of {record.id} stands in the place of {name}")
                found.append(record)
            except WireError as error:
                self._refusals.add(key_of(name), error)
        return found

    def write(self, record: Run | Machine, new: bool) -> bool:
        """Make or renew a record. False if it was to be renewed and is gone: the server lost what it held."""
        is_run = isinstance(record, Run)
        name = run_key(record.id) if is_run else machine_key(record.id)
        content = seal(self._key, name, record)
        lease = record.lease if isinstance(record, Run) else LEASE
        pipe = self._link.pipeline(transaction=False)
        pipe.set(name, content, px=max(int(lease * 1000), 1), xx=not new)
        pipe.sadd(RUNS if is_run else MACHINES, record.id)
        return bool(pipe.execute()[0])

    def remove(self, record: Run | Machine) -> None:
        """Take a record away."""
        is_run = isinstance(record, Run)
        pipe = self._link.pipeline(transaction=False)
        pipe.delete(run_key(record.id) if is_run else machine_key(record.id))
        pipe.srem(RUNS if is_run else MACHINES, record.id)
        pipe.execute()


def assign(runs: Sequence[Run], machines: Sequence[Machine]) -> dict[tuple[str, int], str]:
    """Which run each worker, by machine and number, should work for; those that are left out should wait.

    Fair: runs that are at work have equal shares, to within one, the older ones the larger. A run that waits for more
    workers than its share would be waits until others end. Steady: as few as possible are moved.
    """
    slots = [(machine, slot) for machine in sorted(machines, key=lambda m: m.id) for slot in machine.slots]
    total = len(slots) + sum(machine.starting for machine in machines)  # or a death would move others about
    quota = _quotas(_possible(runs, slots), total)
    chosen: dict[tuple[str, int], str] = {}
    for machine, slot in slots:
        if quota.get(slot.run, 0) and slot.run not in machine.refused_by:
            chosen[machine.id, slot.number] = slot.run
            quota[slot.run] -= 1
    for machine, slot in slots:
        open_to = [run for run, left in quota.items() if left and run not in machine.refused_by]
        if (machine.id, slot.number) not in chosen and open_to:
            run = max(open_to, key=lambda run: quota[run])  # of equals the oldest, which comes first
            chosen[machine.id, slot.number] = run
            quota[run] -= 1
    return chosen


def _possible(runs: Sequence[Run], slots: Sequence[tuple[Machine, Slot]]) -> list[Run]:
    """Runs that at least one machine may work for, oldest first."""
    possible = [run for run in runs if any(run.id not in machine.refused_by for machine, _ in slots)]
    return sorted(possible, key=lambda run: (run.order, run.id))


def _quotas(runs: Sequence[Run], total: int) -> dict[str, int]:
    """How many workers each run should have, oldest first."""
    active = [run for run in runs if run.started]
    for run in runs:
        if not run.started and (not active or total // (len(active) + 1) >= run.need):
            active.append(run)
    active.sort(key=lambda run: (run.order, run.id))
    return {run.id: total // len(active) + (place < total % len(active)) for place, run in enumerate(active)}
