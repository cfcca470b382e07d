"""Which worker runs which task: the hard part of an engine, without any I/O.

Events go in as method calls (submit, joined, left, heard, received, tick), each with the time; commands come out as
a list. The scheduler's table of tasks is the only source of truth: workers and transports may lose all their state.

Rules
- An idle worker gets a task before a busy one gets a second. A second is sent ahead only while tasks are short, when
  the gap between two tasks would matter; a long task would be stuck behind another. The last tasks without a key, no
  more than there are workers, wait for the first worker to finish, unless they are too brief for that to matter.
- Tasks with the same key prefer the worker that ran that key last. A worker that has been idle for a while takes
  over a key from one with tasks waiting.
- A worker runs its tasks in the order sent, so it is running the oldest one. Only that task is blamed when the worker
  is lost; after `attempts` losses the task fails.
- Each time a task is sent, it gets a new ticket. A result counts only if its ticket is the one that the scheduler
  waits for, so duplicates and late results of lost workers change nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from shoal.errors import NoWorkers, PoisonTask, ShoalError


@dataclass(frozen=True, slots=True)
class Send:
    """Send a task to a worker."""

    worker: int
    ticket: int
    task: int


@dataclass(frozen=True, slots=True)
class Ship:
    """Send a shared value to a worker, before a task that needs it."""

    worker: int
    shared: int


@dataclass(frozen=True, slots=True)
class Resolve:
    """A task is done: it returned or raised."""

    task: int
    outcome: object
    """As passed to `Scheduler.received`."""


@dataclass(frozen=True, slots=True)
class Fail:
    """A task cannot be done."""

    task: int
    error: ShoalError


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End a worker that is silent or takes too long."""

    worker: int


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning for the user."""

    text: str


Command = Send | Ship | Resolve | Fail | GiveUp | Notice


@dataclass(slots=True)
class _Task:
    number: int
    label: str
    key: Hashable
    needs: tuple[int, ...]
    since: float  # when it was submitted
    losses: int = 0
    ticket: int | None = None  # the only one whose result counts; None while waiting


@dataclass(slots=True)
class _Worker:
    number: int
    heard: float
    changed: float  # when the oldest task in `queue` got to the front, or the queue became empty
    queue: deque[_Task] = field(default_factory=deque)
    waiting: list[int] = field(default_factory=list)  # heap of tasks whose key lives here
    holds: set[int] = field(default_factory=set)
    keys: set[Hashable] = field(default_factory=set)


@dataclass(slots=True)
class Telemetry:
    """Counters since the engine started."""

    tasks: int = 0
    busy_seconds: float = 0.0
    lost_workers: int = 0


class Scheduler:
    """The task table. Every method takes the time and returns commands to carry out, in order."""

    SHORT = 0.25  # seconds: shorter tasks are sent ahead while others wait...
    BRIEF = 0.005  # ...and tasks shorter than this in any case
    STEAL_AFTER = 0.02  # seconds that a worker has to be idle before it takes over a key

    def __init__(
        self,
        *,
        attempts: int = 3,
        lease: float = 10.0,
        task_timeout: float | None = None,
        patience: float = 60.0,
    ) -> None:
        self.attempts = attempts
        self.lease = lease
        self.task_timeout = task_timeout
        self.patience = patience
        self.telemetry = Telemetry()
        self._tasks: dict[int, _Task] = {}
        self._workers: dict[int, _Worker] = {}
        self._free: list[int] = []  # heap of tasks that any worker may take
        self._by_load: tuple[dict[int, None], dict[int, None]] = ({}, {})  # workers with 0 and 1 task, oldest first
        self._homes: dict[Hashable, int] = {}  # key -> the worker that ran it last
        self._backlogs: set[int] = set()  # workers with tasks in `waiting`
        self._next_ticket = 0
        self._mean_seconds: float | None = None
        self._alone_since: float | None = 0.0
        self._ticked = 0.0

    # Events ---------------------------------------------------------------------------------------------------

    def submit(
        self, now: float, number: int, label: str, key: Hashable = None, needs: Iterable[int] = ()
    ) -> list[Command]:
        """Take on a task. Numbers rise; `needs` are the shared values that the task refers to."""
        if not self._tasks:
            self._alone_since = now
        self._tasks[number] = task = _Task(number, label, key, tuple(needs), now)
        return self._place(now, task)

    def joined(self, now: float, number: int) -> list[Command]:
        """Add a worker that is ready."""
        self._workers[number] = worker = _Worker(number, heard=now, changed=now)
        self._by_load[0][number] = None
        return self._feed(now, worker)

    def left(self, now: float, number: int, reason: str, fault: bool = True) -> list[Command]:
        """Remove a worker and run its tasks elsewhere. Without `fault`, no worker and no task is to blame."""
        worker = self._workers.pop(number, None)
        if worker is None:
            return []
        self.telemetry.lost_workers += fault
        if not self._workers:
            self._alone_since = now
        for level in self._by_load:
            level.pop(number, None)
        self._backlogs.discard(number)
        for key in worker.keys:
            del self._homes[key]
        commands: list[Command] = []
        again: list[_Task] = []
        for position, task in enumerate(worker.queue):
            task.ticket = None
            task.losses += fault and position == 0
            if task.losses >= self.attempts:
                del self._tasks[task.number]
                commands.append(Fail(task.number, _poison(task, reason)))
            else:
                again.append(task)
        again += [self._tasks[waiting] for waiting in worker.waiting if waiting in self._tasks]
        if worker.queue and worker.queue[0] in again:
            first = worker.queue[0]
            reason = f"{reason}; {first.label} is run again ({first.losses}/{self.attempts})"
        if fault:  # otherwise the transport reports what happened to all workers at once
            commands.append(Notice(f"worker {number} {reason}"))
        for task in again:
            commands += self._place(now, task)
        return commands

    def heard(self, now: float, number: int) -> list[Command]:
        """Note that a worker is alive."""
        if number in self._workers:
            self._workers[number].heard = now
        return []

    def received(
        self, now: float, number: int, ticket: int, outcome: object, seconds: float | None = 0.0
    ) -> list[Command]:
        """Take a worker's reply. The scheduler does not look at `outcome`: a result or an error.

        `seconds` is how long the task took; None if it was cancelled before it was sent.
        """
        worker = self._workers.get(number)
        if worker is None:
            return []
        worker.heard = now
        task = next((task for task in worker.queue if task.ticket == ticket), None)
        if task is None:
            return []
        self._unlist(worker)
        worker.queue.remove(task)
        self._list(worker)
        worker.changed = now
        del self._tasks[task.number]
        if seconds is not None:
            self.telemetry.tasks += 1
            self.telemetry.busy_seconds += seconds
            mean = self._mean_seconds
            self._mean_seconds = seconds if mean is None else 0.9 * mean + 0.1 * seconds
        return [Resolve(task.number, outcome), *self._feed(now, worker)]

    def tick(self, now: float) -> list[Command]:
        """Check leases, deadlines and idle workers. To be called regularly."""
        commands: list[Command] = []
        if now - self._ticked > self.lease / 2:  # the head itself was stopped or busy, so no worker is to blame
            for worker in self._workers.values():
                worker.heard = worker.changed = now
        self._ticked = now
        for worker in list(self._workers.values()):
            reason = self._overdue(now, worker)
            if reason:
                commands.append(GiveUp(worker.number))
                commands += self.left(now, worker.number, reason)
        if self._tasks and not self._workers and self._alone_since is not None:
            waited = now - self._alone_since
            if waited > self.patience:
                error = NoWorkers(f"{len(self._tasks)} tasks waited {waited:.0f} s for a worker, but none connected")
                commands += [Fail(number, error) for number in self._tasks]
                self._tasks.clear()
        commands += self._steal(now)
        return commands

    def forget(self, shared: int) -> list[int]:
        """Drop a shared value that is no longer needed; return the workers that hold it."""
        holders = [worker for worker in self._workers.values() if shared in worker.holds]
        for worker in holders:
            worker.holds.remove(shared)
        return [worker.number for worker in holders]

    def wait(self) -> float:
        """Return the seconds that the caller may sleep before the next `tick`."""
        return self.STEAL_AFTER if self._backlogs and self._by_load[0] else 0.5

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers that have joined and not left."""
        return list(self._workers)

    # Placement ------------------------------------------------------------------------------------------------

    def _depth(self) -> int:
        return 2 if self._mean_seconds is not None and self._mean_seconds < self.SHORT else 1

    def _takes(self, worker: _Worker) -> bool:
        """Whether a worker with room takes the oldest free task, or leaves it to the first worker that finishes."""
        if not self._free or not worker.queue:
            return bool(self._free)
        task = self._tasks[self._free[0]]
        brief = self._mean_seconds is not None and self._mean_seconds < self.BRIEF
        waited = task.number < worker.queue[0].number  # a later task overtook it because of its key
        return brief or waited or task.key is not None or len(self._free) > len(self._workers)

    def _place(self, now: float, task: _Task) -> list[Command]:
        """Send a task now if a worker has room, otherwise queue it."""
        home = self._homes.get(task.key) if task.key is not None else None
        if home is not None:
            worker = self._workers[home]
            if len(worker.queue) < self._depth() and not worker.waiting:
                return self._send(now, worker, task)
            heapq.heappush(worker.waiting, task.number)
            self._backlogs.add(home)
            return []
        idle, busy = self._by_load
        if idle and not self._free:
            return self._send(now, self._workers[next(iter(idle))], task)
        heapq.heappush(self._free, task.number)
        return self._feed(now, self._workers[next(iter(busy))]) if busy else []

    def _feed(self, now: float, worker: _Worker) -> list[Command]:
        """Fill a worker's room from its own backlog and the free tasks, oldest first."""
        commands: list[Command] = []
        while len(worker.queue) < self._depth():
            self._trim(worker.waiting)
            self._trim(self._free)
            takes = self._takes(worker)
            if worker.waiting and not (takes and self._free[0] < worker.waiting[0]):
                number = heapq.heappop(worker.waiting)
            elif takes:
                number = heapq.heappop(self._free)
                if self._homes.get(self._tasks[number].key, worker.number) != worker.number:
                    commands += self._place(now, self._tasks[number])  # its key got another home while it waited
                    continue
            else:
                break
            commands += self._send(now, worker, self._tasks[number])
        if not worker.waiting:
            self._backlogs.discard(worker.number)
        return commands

    def _trim(self, heap: list[int]) -> None:
        """Drop failed tasks from the top of a heap."""
        while heap and heap[0] not in self._tasks:
            heapq.heappop(heap)

    def _send(self, now: float, worker: _Worker, task: _Task) -> list[Command]:
        task.ticket = self._next_ticket
        self._next_ticket += 1
        if not worker.queue:
            worker.changed = now
        self._unlist(worker)
        worker.queue.append(task)
        self._list(worker)
        if task.key is not None:
            self._move(task.key, worker)
        missing = [shared for shared in task.needs if shared not in worker.holds]
        worker.holds.update(missing)
        ships: list[Command] = [Ship(worker.number, shared) for shared in missing]
        return [*ships, Send(worker.number, task.ticket, task.number)]

    def _move(self, key: Hashable, worker: _Worker) -> None:
        home = self._homes.get(key)
        if home is not None and home != worker.number:
            self._workers[home].keys.discard(key)
        self._homes[key] = worker.number
        worker.keys.add(key)

    def _steal(self, now: float) -> list[Command]:
        """Let idle workers take over keys from those with a backlog, once waiting probably costs more than moving."""
        patience = max(self.STEAL_AFTER, 2 * (self._mean_seconds or 0.0))
        commands: list[Command] = []
        for number in [n for n in self._by_load[0] if now - self._workers[n].changed >= patience]:
            if not self._backlogs:
                break
            victim = self._workers[max(self._backlogs, key=lambda n: (len(self._workers[n].waiting), -n))]
            self._trim(victim.waiting)
            # The task must have waited too: a batch is submitted one by one, and the idle worker's own may be next.
            if victim.waiting and now - self._tasks[victim.waiting[0]].since >= patience:
                commands += self._send(now, self._workers[number], self._tasks[heapq.heappop(victim.waiting)])
            if not victim.waiting:
                self._backlogs.discard(victim.number)
        return commands

    def _overdue(self, now: float, worker: _Worker) -> str:
        if now - worker.heard > self.lease:
            return f"gave no sign of life for {now - worker.heard:.0f} s"
        if self.task_timeout is not None and worker.queue and now - worker.changed > self.task_timeout:
            return f"spent {now - worker.changed:.0f} s on one task (the limit is {self.task_timeout:g} s)"
        return ""

    def _list(self, worker: _Worker) -> None:
        if len(worker.queue) < len(self._by_load):
            self._by_load[len(worker.queue)][worker.number] = None

    def _unlist(self, worker: _Worker) -> None:
        if len(worker.queue) < len(self._by_load):
            self._by_load[len(worker.queue)].pop(worker.number)


def _poison(task: _Task, reason: str) -> PoisonTask:
    return PoisonTask(
        f"{task.label} was running on {task.losses} workers when each was lost (the last one {reason}). Likely causes: "
        f"the environment or a C library crashes, or memory ran out. To reproduce it in this process, where a debugger "
        f"can be attached, run the same with --engine serial"
    )
