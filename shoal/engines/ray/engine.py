"""The ray engine.

Each actor has a `Server`; a message is one call of it, with bytes. A shared value is put into Ray's object store once,
and each node fetches it once. Ray says when an actor is lost; whether one was stopped, or died while it was idle, is
seen in the process table of its machine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from shoal.base.host import WORKER_ENVIRONMENT, available_cores
from shoal.engines import wire
from shoal.engines.functions import main_script, refuse_while_loading
from shoal.engines.ray.actors import Watcher, Worker, end_stopped, living, machine
from shoal.engines.ray.session import RuntimeEnv, Session, restore_sigterm_handler, short_error
from shoal.engines.remote import Broken, Event, Heard, Left, Received, RemoteEngine
from shoal.engines.scheduler import Scheduler
from shoal.engines.wire import Kind, Message
from shoal.errors import EngineError, UsageError, WorkerRefused

log = logging.getLogger("shoal.engine")

OPTIONS = ("placement", "num_cpus", "resources", "runtime_env")
"""What `--engine-options` may hold."""
PLACEMENTS = ("spread", "pack")

_LOOK_EVERY = 1.0  # seconds between looks at processes
_NODES_EVERY = 2.0  # seconds between looks at the cluster
_FAILED_STARTS = 3  # in a row, before an engine without workers gives up
_LONGEST_PAUSE = 30.0  # seconds between attempts to start a worker
_PATIENCE = 300.0  # seconds that tasks wait for a first worker: a runtime environment may have to be installed


def problems(address: str | None, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with an address and options, all of it."""
    found = []
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            found.append(f"the address of a Ray cluster is HOST:PORT, such as ray://10.0.0.1:6379, not {address!r}")
    found += [f"ray has no option {name!r}, only {', '.join(OPTIONS)}" for name in options if name not in OPTIONS]
    if options.get("placement", "spread") not in PLACEMENTS:
        found.append(f"placement is spread (over the nodes) or pack (fill one first), not {options['placement']!r}")
    amounts = {"num_cpus": options.get("num_cpus", 1)}
    resources, environment = options.get("resources", {}), options.get("runtime_env", {})
    if isinstance(resources, dict):
        amounts |= {f"resources: {name}": amount for name, amount in resources.items()}
    else:
        found.append(f'resources are names and amounts such as {{"gpu_node": 1}}, not {resources!r}')
    for name, amount in amounts.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
            found.append(f"{name} must be a number above 0, not {amount!r}")
    if not isinstance(environment, dict):
        found.append(f'runtime_env is a Ray runtime environment such as {{"working_dir": "."}}, not {environment!r}')
    return found


class RayEngine(RemoteEngine):
    """`workers` actors of a Ray cluster, or as many as fit while nodes come and go.

    Without an address it joins the cluster of RAY_ADDRESS; if that is not set, it starts Ray on this machine.
    `placement` is "spread" over the nodes or "pack" (fill one first). `num_cpus` and `resources` are what each worker
    takes. `runtime_env` is Ray's: `{"working_dir": "."}` ships the modules of this folder to the nodes.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        address: str | None = None,
        placement: str = "spread",
        num_cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        task_timeout: float | None = None,
        lease: float = 10.0,
        allow_mixed: bool = False,
    ) -> None:
        refuse_while_loading()  # before Ray is started for nothing
        options = {"placement": placement, "num_cpus": num_cpus, "resources": resources or {}}
        wrong = problems(address, options | {"runtime_env": runtime_env or {}})
        if wrong:
            raise UsageError(wrong)
        demand = {"CPU": num_cpus} | dict(resources or {})
        shipped = dict(runtime_env or {})
        cpus = max(float(available_cores()), (workers or 0) * num_cpus)
        session = Session.join(address or os.environ.get("RAY_ADDRESS"), cpus, shipped)
        restore_sigterm_handler()
        try:
            transport = _Actors(session, workers, demand, placement, shipped)
        except BaseException:
            session.leave()
            raise
        main = main_script()
        self._source = Path(main).read_bytes() if main and Path(main).is_file() else None
        scheduler = Scheduler(task_timeout=task_timeout, lease=lease, patience=_PATIENCE)
        super().__init__(transport, workers=transport.wanted, scheduler=scheduler, allow_mixed=allow_mixed)
        transport.resized = functools.partial(setattr, self, "workers")

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are running on this machine, oldest first."""
        return self._transport.pids()  # type: ignore[attr-defined, no-any-return]

    def _settings(self) -> dict[str, Any]:
        """The script travels along: other nodes need not have it."""
        return super()._settings() | {"source": self._source}


@dataclass(slots=True)
class _Node:
    fits: int
    """How many workers it holds, by what it has in all."""
    address: str
    refused: bool = False


@dataclass(slots=True)
class _Actor:
    number: int
    handle: Any
    node: str
    """Where it is; where it is meant to be until it has said so. Empty: wherever there is room."""
    pid: int = 0
    """0 until it has said hello."""
    machine: str = ""


@dataclass(slots=True)
class _Watch:
    handle: Any
    answered: bool = False


@dataclass(slots=True)
class _Put:
    reference: Any
    holders: set[int] = field(default_factory=set)


class _Actors:
    """The transport. Answers of Ray come into one queue, which only the pump thread reads."""

    def __init__(
        self,
        session: Session,
        workers: int | None,
        demand: Mapping[str, float],
        placement: str,
        runtime_env: RuntimeEnv,
    ) -> None:
        self._session, self._ray = session, session.ray
        self._fixed, self._demand, self._placement = workers, demand, placement
        self._options: dict[str, Any] = {
            "num_cpus": demand["CPU"],
            "resources": {name: amount for name, amount in demand.items() if name != "CPU"},
        }
        if runtime_env != session.runtime_env:  # that of another engine, or of the user's own `ray.init`
            self._options["runtime_env"] = runtime_env | {
                "env_vars": WORKER_ENVIRONMENT | runtime_env.get("env_vars", {})
            }
        elif not session.started:  # a Ray of our own was started with these variables
            self._options["runtime_env"] = {"env_vars": WORKER_ENVIRONMENT}
        self._name = f"shoal-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._worker_class = self._ray.remote(Worker)
        self._machine = machine()
        self._inbox: SimpleQueue[tuple[Callable[[Future[Any]], list[Event]], Future[Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two tables that `send` uses
        self._actors: dict[int, _Actor] = {}
        self._shared: dict[int, _Put] = {}
        self._watchers: dict[str, _Watch] = {}
        self._nodes: dict[str, _Node] = {}
        self._next_number = 0
        self._failed_starts = 0
        self._start_at = self._look_at = self._nodes_at = 0.0
        self._said_full = False
        self.resized: Callable[[int], None] = lambda _: None
        self.wanted: int = 0
        self._see_nodes()
        if not self.wanted:
            raise UsageError(
                f"no node of the Ray cluster has room for a worker, which takes {_amounts(demand)}. To see what "
                f"the nodes have, type: ray status"
            )

    def pids(self) -> list[int]:
        with self._lock:
            return [one.pid for one in self._actors.values() if one.pid and one.machine == self._machine]

    # The pump thread ------------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> Sequence[Event]:
        now = time.monotonic()
        if now >= self._nodes_at:
            self._nodes_at = now + _NODES_EVERY
            self._see_nodes()
        try:
            while len(self._actors) < self.wanted and now >= self._start_at and self._start():
                pass
        except ValueError as error:  # Ray checks options only now
            return [Broken(EngineError(f"Ray does not take the options of the engine: {error}"))]
        events: list[Event] = []
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            events += self._look()
        with contextlib.suppress(Empty):
            item = self._inbox.get(timeout=0.0 if events else timeout)
            while True:
                if item is not None:
                    then, future = item
                    events += then(future)
                item = self._inbox.get_nowait()
        return events

    def _see_nodes(self) -> None:
        """Which nodes there are now, and how many workers that makes."""
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for name, node in alive.items():
            fits = int(min(node["Resources"].get(what, 0.0) // amount for what, amount in self._demand.items()))
            self._nodes.setdefault(name, _Node(fits, node["NodeManagerAddress"])).fits = fits
        for name in set(self._nodes) - set(alive):
            del self._nodes[name]
            self._watchers.pop(name, None)
        room = sum(node.fits for node in self._nodes.values() if not node.refused)
        wanted = room if self._fixed is None else self._fixed
        if wanted != self.wanted:
            if self.wanted:
                log.info("the Ray cluster has %d node(s) now, with room for %d workers", len(alive), wanted)
            self.wanted = wanted
            self.resized(max(wanted, 1))
            for actor in [one for one in self._actors.values() if not one.pid][: max(len(self._actors) - wanted, 0)]:
                self.drop(actor.number)  # it waits for room on a node that is gone
        if wanted > room and not self._said_full:
            self._said_full = True
            log.warning("the Ray cluster has room for %d of %d workers; others start when there is more", room, wanted)

    def _start(self) -> bool:
        """Start one worker where there is room for it."""
        strategy, node = self._place()
        if strategy is None:
            return False
        number = self._next_number
        self._next_number += 1
        options = self._options | {"name": f"{self._name}-worker-{number}", "scheduling_strategy": strategy}
        handle = self._worker_class.options(**options).remote()
        with self._lock:
            self._actors[number] = _Actor(number, handle, node)
        self._ask(handle.hello.remote(), functools.partial(self._hello, number))
        return True

    def _place(self) -> tuple[Any, str]:
        """A node with room: the emptiest to spread, the fullest to pack. Without one, wherever there will be room."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        used = dict.fromkeys(self._nodes, 0)
        for actor in self._actors.values():
            if actor.node in used:
                used[actor.node] += 1
        room = {name: used[name] / node.fits for name, node in self._nodes.items()
                if used[name] < node.fits and not node.refused}  # fmt: skip
        picky = any(node.refused for node in self._nodes.values())
        if not room:
            return (None if picky or self._fixed is None else "DEFAULT"), ""
        order = sorted(room, key=lambda name: (room[name], self._nodes[name].fits, name))
        chosen = order[-1 if self._placement == "pack" else 0]  # to pack, begin with the node that holds most
        # Others may be using that node; then the worker may go elsewhere, unless it might go where it is refused.
        return NodeAffinitySchedulingStrategy(chosen, soft=not picky, _spill_on_unavailable=not picky), chosen

    def _ask(self, reference: Any, then: Callable[[Future[Any]], list[Event]]) -> None:
        reference.future().add_done_callback(lambda future: self._inbox.put((then, future)))

    def _hello(self, number: int, future: Future[Any]) -> list[Event]:
        actor = self._actors.get(number)
        if actor is None:
            return []
        error = future.exception()
        if error is not None:
            return self._gone(number, short_error(error))
        theirs, pid, where, node = wire.decode(future.result())
        with self._lock:
            actor.pid, actor.machine, actor.node = pid, where, node
        self._failed_starts = 0
        return [Received(number, Message(Kind.HELLO, 0, wire.encode(theirs)))]

    def _done(self, number: int, ticket: int, future: Future[Any]) -> list[Event]:
        error = future.exception()
        if error is not None:
            return self._gone(number, _how(error))
        answer = memoryview(future.result())
        return [Received(number, Message(answer[-1], ticket, answer[:-1]))]

    def _look(self) -> list[Event]:
        """Who lives? On this machine at once; elsewhere the answer comes later."""
        places: dict[str, dict[int, int]] = {}
        for actor in self._actors.values():
            if actor.pid:
                here = actor.machine == self._machine
                places.setdefault("" if here else actor.node, {})[actor.pid] = actor.number
        events: list[Event] = []
        for node, numbers in places.items():
            if not node:
                events += self._seen(numbers, living(list(numbers)))
            elif node in self._nodes:
                watcher = self._watcher(node)
                if not watcher.answered:  # it is only starting, which is not the workers' fault
                    events += [Heard(number) for number in numbers.values()]
                asked = watcher.handle.living.remote(bytes(wire.encode(list(numbers))))
                self._ask(asked, functools.partial(self._seen_elsewhere, node, numbers))
        return events

    def _watcher(self, node: str) -> _Watch:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._watchers:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"name": f"{self._name}-watcher-{node[:6]}", "num_cpus": 0, "scheduling_strategy": where}
            self._watchers[node] = _Watch(self._ray.remote(Watcher).options(**options).remote())
        return self._watchers[node]

    def _seen_elsewhere(self, node: str, numbers: dict[int, int], future: Future[Any]) -> list[Event]:
        if future.exception() is not None:  # its node is gone, or it was killed: the next look starts another
            self._watchers.pop(node, None)
            return []
        if node in self._watchers:
            self._watchers[node].answered = True
        return self._seen(numbers, [(pid, runs) for pid, runs in wire.decode(future.result())])

    def _seen(self, numbers: dict[int, int], alive: list[tuple[int, bool]]) -> list[Event]:
        events: list[Event] = [Heard(numbers[pid]) for pid, runs in alive if runs]
        for pid in set(numbers) - {pid for pid, _ in alive}:
            events += self._gone(numbers[pid], "died")
        return events

    def _gone(self, number: int, reason: str) -> list[Event]:
        actor = self._actors.get(number)
        if actor is None:
            return []
        where = self._nodes.get(actor.node)
        self.drop(number)
        if actor.pid:
            return [Left(number, f"{reason} (node {where.address})" if where and not self._session.started else reason)]
        self._nodes_at = 0.0  # its node may be gone
        self._failed_starts += 1
        self._start_at = time.monotonic() + min(0.1 * 4**self._failed_starts, _LONGEST_PAUSE)
        if self._failed_starts < _FAILED_STARTS or any(other.pid for other in self._actors.values()):
            return []
        return [Broken(_cannot_start(reason))]

    # Any thread -----------------------------------------------------------------------------------------------

    def send(self, worker: int, message: Message) -> None:
        with self._lock:
            actor = self._actors.get(worker)
            if actor is None:
                return
            kind, number, frame = message
            if kind == Kind.TASK:
                self._ask(
                    actor.handle.take.remote(kind, number, bytes(frame)),
                    functools.partial(self._done, worker, number),
                )
                return
            content: Any = bytes(frame)
            if kind == Kind.SHARE:
                put = self._shared.setdefault(number, _Put(None))
                put.reference = put.reference or self._ray.put(content)
                put.holders.add(worker)
                content = put.reference
            elif kind == Kind.FORGET:
                self._shared.pop(number, None)
            actor.handle.take.options(num_returns=0).remote(kind, number, content)

    def wake(self) -> None:
        self._inbox.put(None)

    def drop(self, worker: int) -> None:
        with self._lock:
            actor = self._actors.pop(worker, None)
            for number, put in list(self._shared.items()):
                put.holders.discard(worker)
                if not put.holders:
                    del self._shared[number]
        if actor is not None:
            self._kill(actor)

    def _kill(self, actor: _Actor) -> None:
        self._ray.kill(actor.handle)
        if actor.pid and actor.machine == self._machine:
            end_stopped(actor.pid)
        elif actor.node in self._watchers:
            self._watchers[actor.node].handle.end_stopped.options(num_returns=0).remote(actor.pid)

    def refuse(self, worker: int, error: WorkerRefused) -> Sequence[Event]:
        """Only its node has to go, unless there is no other."""
        node = self._nodes.get(self._actors[worker].node)
        self.drop(worker)
        if node is None or node.refused:
            return []
        node.refused = True
        if all(one.refused for one in self._nodes.values()):
            return [Broken(error)]
        log.warning("node %s is not used: %s", node.address, error)
        self._nodes_at = 0.0
        return []

    def close(self) -> None:
        for number in list(self._actors):
            self.drop(number)
        for watcher in self._watchers.values():
            self._ray.kill(watcher.handle)
        self._session.leave()


def _how(error: BaseException) -> str:
    """How a worker was lost. Ray's reports are pages long."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "OUT_OF_MEMORY" in text:
        return "was ended because its node ran out of memory"
    if "node has died" in text or "NODE_DIED" in text:
        return "went with its node"
    return "died" if type(error).__name__ in ("ActorDiedError", "RayActorError") else short_error(error)


def _amounts(demand: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in demand.items())


def _cannot_start(reason: str) -> EngineError:
    return EngineError(
        f"workers cannot be started: {_FAILED_STARTS} Ray actors in a row ended before they were ready (the last one: "
        f"{reason}). Likely causes: Shoal or a package is not installed on the nodes, or the runtime environment is "
        f"wrong. To see more, type: shoal doctor"
    )
