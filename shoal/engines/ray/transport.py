"""The transport of the ray engine.

A message is one call of an actor, with bytes. A shared value is put into Ray's object store once, and each node
fetches it once. Ray reports actors that die during a call; those that die while idle, or are stopped by a signal, are
found in the process table of their machine.
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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from shoal.base.backoff import Backoff
from shoal.base.host import WORKER_ENVIRONMENT
from shoal.engines import wire
from shoal.engines.ray.actors import ActorHello, WorkerActor, kill_if_stopped, live_processes, process_table_id
from shoal.engines.ray.nodes import RayNodes
from shoal.engines.ray.session import RuntimeEnv, Session, short_error
from shoal.engines.ray.watchers import NodeWatchers
from shoal.engines.remote import Broken, Event, Heard, Left, Received
from shoal.engines.wire import Kind, Message
from shoal.errors import EngineError, UsageError, WorkerRefused

log = logging.getLogger("shoal.engine")

_LOOK_EVERY = 1.0  # seconds between looks at process tables
_NODES_EVERY = 2.0  # seconds between looks at the cluster's nodes
_FAILED_STARTS = 3  # in a row, before an engine without workers gives up

_Callback = Callable[[Future[bytes]], list[Event]]


@dataclass(slots=True)
class _Actor:
    number: int
    handle: Any
    node: str
    """Until the hello, the node it is meant for; empty if any node will do."""
    pid: int = 0
    """0 until the hello."""
    process_table: str = ""


@dataclass(slots=True)
class _StoredValue:
    """A shared value in Ray's object store, kept while any worker holds it."""

    reference: Any = None
    holders: set[int] = field(default_factory=set)


class RayTransport:
    """Keeps `workers` actors running, or as many as fit. Ray's answers go to one queue that the pump thread reads."""

    def __init__(
        self,
        session: Session,
        workers: int | None,
        demand: Mapping[str, float],
        placement: str,
        runtime_env: RuntimeEnv,
    ) -> None:
        self._session, self._ray = session, session.ray
        self._fixed = workers
        self._options = _actor_options(session, demand, runtime_env)
        self._name = f"shoal-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._worker_class = self._ray.remote(WorkerActor)
        self._process_table = process_table_id()
        self._inbox: SimpleQueue[tuple[_Callback, Future[bytes]] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the next two, which `send` uses
        self._actors: dict[int, _Actor] = {}
        self._shared: dict[int, _StoredValue] = {}
        self._nodes = RayNodes(self._ray, demand, placement)
        self._watchers = NodeWatchers(self._ray, self._name)
        self._next_number = 0
        self._failed_starts = 0
        self._pauses = Backoff(0.4, 30.0, factor=4)
        self._start_at = self._look_at = self._nodes_at = 0.0
        self._warned_full = False
        self.resized: Callable[[int], None] = lambda _: None
        """Called with the new number of workers whenever it changes."""
        self.wanted: int = 0
        self._refresh_nodes()
        if not self.wanted:
            amounts = ", ".join(f"{amount:g} {name}" for name, amount in demand.items())
            raise UsageError(
                f"no node of the Ray cluster has room for a worker, which needs {amounts}. To see each node's "
                f"resources, run: ray status"
            )

    def pids(self) -> list[int]:
        with self._lock:
            actors = self._actors.values()
            return [actor.pid for actor in actors if actor.pid and actor.process_table == self._process_table]

    # The pump thread ------------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> Sequence[Event]:
        now = time.monotonic()
        if now >= self._nodes_at:
            self._nodes_at = now + _NODES_EVERY
            self._refresh_nodes()
        try:
            while len(self._actors) < self.wanted and now >= self._start_at and self._start():
                pass
        except ValueError as error:  # Ray validates an actor's options only when it starts one
            return [Broken(EngineError(f"Ray rejects the options of the engine: {error}"))]
        events: list[Event] = []
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            events += self._look()
        with contextlib.suppress(Empty):
            item = self._inbox.get(timeout=0.0 if events else timeout)
            while True:
                if item is not None:
                    callback, future = item
                    events += callback(future)
                item = self._inbox.get_nowait()
        return events

    def _refresh_nodes(self) -> None:
        """Adapt to nodes that have joined or left."""
        for node in self._nodes.refresh():
            self._watchers.forget(node)
        room = self._nodes.room
        wanted = room if self._fixed is None else self._fixed
        if wanted != self.wanted:
            self._resize(wanted)
        if wanted > room and not self._warned_full:
            self._warned_full = True
            log.warning(
                "the Ray cluster has room for %d of %d workers; the others start when more nodes join", room, wanted
            )

    def _resize(self, wanted: int) -> None:
        if self.wanted:
            log.info("the Ray cluster now has %d node(s), with room for %d workers", len(self._nodes), wanted)
        self.wanted = wanted
        self.resized(max(wanted, 1))
        surplus = max(len(self._actors) - wanted, 0)
        for actor in [actor for actor in self._actors.values() if not actor.pid][:surplus]:
            self.drop(actor.number)  # it waits for room on a node that has left

    def _start(self) -> bool:
        """Start one worker. False if it has to wait for a node with room."""
        node = self._nodes.choose(Counter(actor.node for actor in self._actors.values()))
        if node is None and (self._fixed is None or self._nodes.any_refused):
            return False
        number = self._next_number
        self._next_number += 1
        options = self._options | {
            "name": f"{self._name}-worker-{number}",
            "scheduling_strategy": "DEFAULT" if node is None else self._prefer(node),
        }
        handle = self._worker_class.options(**options).remote()
        with self._lock:
            self._actors[number] = _Actor(number, handle, node or "")
        self._ask(handle.hello.remote(), functools.partial(self._hello, number))
        return True

    def _prefer(self, node: str) -> object:
        """Ray's strategy for a node. If other users have filled it, another one will do, unless some are refused."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        anywhere = not self._nodes.any_refused
        return NodeAffinitySchedulingStrategy(node, soft=anywhere, _spill_on_unavailable=anywhere)

    def _ask(self, reference: Any, callback: _Callback) -> None:
        """Have the pump thread call back with the future of one of Ray's references."""
        reference.future().add_done_callback(lambda future: self._inbox.put((callback, future)))

    def _hello(self, number: int, future: Future[bytes]) -> list[Event]:
        actor = self._actors.get(number)
        if actor is None:
            return []
        error = future.exception()
        if error is not None:
            return self._gone(number, short_error(error))
        hello: ActorHello = wire.decode(future.result())
        with self._lock:
            actor.pid, actor.process_table, actor.node = hello["pid"], hello["process_table"], hello["node"]
        self._failed_starts = 0
        self._pauses.reset()
        return [Received(number, Message(Kind.HELLO, 0, wire.encode(hello["fingerprint"])))]

    def _done(self, number: int, ticket: int, future: Future[bytes]) -> list[Event]:
        error = future.exception()
        if error is not None:
            return self._gone(number, _describe_loss(error))
        answer = memoryview(future.result())
        return [Received(number, Message(answer[-1], ticket, answer[:-1]))]

    def _look(self) -> list[Event]:
        """Check that workers are alive: at once on this machine, through watchers elsewhere."""
        local: dict[int, int] = {}  # worker by pid
        remote: dict[str, dict[int, int]] = {}  # the same, by node
        for actor in self._actors.values():
            if actor.pid and actor.process_table == self._process_table:
                local[actor.pid] = actor.number
            elif actor.pid and actor.node in self._nodes:
                remote.setdefault(actor.node, {})[actor.pid] = actor.number
        events = self._looked(local, live_processes(list(local)))
        for node, workers in remote.items():
            if not self._watchers.is_ready(node):  # it is still starting, which is no sign of dead workers
                events += [Heard(number) for number in workers.values()]
            question = self._watchers.live_processes(node, list(workers))
            self._ask(question, functools.partial(self._watched, node, workers))
        return events

    def _watched(self, node: str, workers: dict[int, int], future: Future[bytes]) -> list[Event]:
        if future.exception() is not None:  # the node has left, or the watcher was killed
            self._watchers.forget(node)
            return []
        self._watchers.answered(node)
        return self._looked(workers, [(pid, runs) for pid, runs in wire.decode(future.result())])

    def _looked(self, workers: dict[int, int], alive: list[tuple[int, bool]]) -> list[Event]:
        events: list[Event] = [Heard(workers[pid]) for pid, runs in alive if runs]
        for pid in set(workers) - {pid for pid, _ in alive}:
            events += self._gone(workers[pid], "died")
        return events

    def _gone(self, number: int, reason: str) -> list[Event]:
        actor = self._actors.get(number)
        if actor is None:
            return []
        node = self._nodes.get(actor.node)
        self.drop(number)
        if actor.pid:
            return [Left(number, f"{reason} (node {node.address})" if node and not self._session.started else reason)]
        self._nodes_at = 0.0  # the node may have left
        self._failed_starts += 1
        self._start_at = time.monotonic() + self._pauses.next()
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
                answer = actor.handle.take.remote(kind, number, bytes(frame))
                self._ask(answer, functools.partial(self._done, worker, number))
                return
            content: object = bytes(frame)
            if kind == Kind.SHARE:
                stored = self._shared.setdefault(number, _StoredValue())
                stored.reference = stored.reference or self._ray.put(content)
                stored.holders.add(worker)
                content = stored.reference
            elif kind == Kind.FORGET:
                self._shared.pop(number, None)
            actor.handle.take.options(num_returns=0).remote(kind, number, content)

    def wake(self) -> None:
        self._inbox.put(None)

    def drop(self, worker: int) -> None:
        with self._lock:
            actor = self._actors.pop(worker, None)
            for number, stored in list(self._shared.items()):
                stored.holders.discard(worker)
                if not stored.holders:
                    del self._shared[number]
        if actor is not None:
            self._kill(actor)

    def _kill(self, actor: _Actor) -> None:
        self._ray.kill(actor.handle)
        if actor.pid and actor.process_table == self._process_table:
            kill_if_stopped(actor.pid)
        else:
            self._watchers.kill_if_stopped(actor.node, actor.pid)

    def refuse(self, worker: int, error: WorkerRefused) -> Sequence[Event]:
        """Stop using the worker's node; the engine is broken once no other is left."""
        node = self._nodes.get(self._actors[worker].node)
        self.drop(worker)
        if node is None or node.refused:
            return []
        node.refused = True
        if all(other.refused for other in self._nodes.values()):
            return [Broken(error)]
        log.warning("node %s is not used: %s", node.address, error)
        self._nodes_at = 0.0
        return []

    def close(self) -> None:
        for number in list(self._actors):
            self.drop(number)
        self._watchers.close()
        self._session.leave()


def _actor_options(session: Session, demand: Mapping[str, float], runtime_env: RuntimeEnv) -> dict[str, object]:
    """Build Ray's options for a worker."""
    options: dict[str, object] = {
        "num_cpus": demand["CPU"],
        "resources": {name: amount for name, amount in demand.items() if name != "CPU"},
    }
    if runtime_env != session.runtime_env:  # the session is another engine's, or from the user's own `ray.init`
        options["runtime_env"] = runtime_env | {"env_vars": WORKER_ENVIRONMENT | runtime_env.get("env_vars", {})}
    elif not session.started:  # a Ray that Shoal started has these variables already
        options["runtime_env"] = {"env_vars": WORKER_ENVIRONMENT}
    return options


def _describe_loss(error: BaseException) -> str:
    """Say in a few words how a worker was lost; Ray's reports are pages long."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "OUT_OF_MEMORY" in text:
        return "was killed because its node ran out of memory"
    if "node has died" in text or "NODE_DIED" in text:
        return "was lost with its node"
    return "died" if type(error).__name__ in ("ActorDiedError", "RayActorError") else short_error(error)


def _cannot_start(reason: str) -> EngineError:
    return EngineError(
        f"workers cannot be started: {_FAILED_STARTS} Ray actors in a row ended before they were ready (the last one: "
        f"{reason}). Likely causes: Shoal or a package is not installed on the nodes, or the runtime environment is "
        f"wrong. To check the installation, run: shoal doctor"
    )
