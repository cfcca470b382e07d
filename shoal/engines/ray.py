"""Workers as Ray actors: on this machine, or on all nodes of a cluster while they come and go.

Each actor has a `Server`; a message is one call of it, with bytes. A shared value is put into Ray's object store once,
and each node fetches it once. Ray says when an actor is lost; whether one was stopped, or died while it was idle, is
seen in the process table of its machine.

Ray belongs to the process, not to an engine: engines that are open at the same time use the same one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from shoal.engines import wire
from shoal.engines.fingerprint import fingerprint
from shoal.engines.functions import main_script, refuse_while_loading
from shoal.engines.keeper import Keeper
from shoal.engines.processes import available_cores, process_state, python_path
from shoal.engines.remote import Broken, Event, Heard, Left, Received, RemoteEngine
from shoal.engines.scheduler import Scheduler
from shoal.engines.wire import Kind, Message
from shoal.engines.worker import ENVIRONMENT, Server
from shoal.errors import EngineError, MissingExtra, UsageError, WorkerRefused

log = logging.getLogger("shoal.engine")

INSTALL = "pip install 'shoal[ray]'"
OPTIONS = ("placement", "num_cpus", "resources", "runtime_env")
"""What `--engine-options` may hold."""
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers yield to everything else unless told: on a busy machine they hardly run.
    "RAY_worker_niceness": "0",
}
"""Variables for the start of Ray on a machine."""
FOLDERS = Path("/tmp")  # noqa: S108  mkdtemp makes folders that are ours alone
"""Where Ray's sessions are; names of sockets in it must be short."""
PLACEMENTS = ("spread", "pack")

_LOOK_EVERY = 1.0  # seconds between looks at processes
_NODES_EVERY = 2.0  # seconds between looks at the cluster
_FAILED_STARTS = 3  # in a row, before an engine without workers gives up
_LONGEST_PAUSE = 30.0  # seconds between attempts to start a worker
_PATIENCE = 300.0  # seconds that tasks wait for a first worker: a runtime environment may have to be installed
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # what Ray does on a Mac: no port is open to the network
_CONNECT = 5.0  # seconds for a cluster to answer


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
        session = _Session.join(address or os.environ.get("RAY_ADDRESS"), cpus, shipped)
        _take_signals_back()
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


# The workers' side --------------------------------------------------------------------------------------------


def machine() -> str:
    """Equal for two processes if, and only if, they see the same process table."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()


def living(pids: Sequence[int]) -> list[tuple[int, bool]]:
    """Those processes that there are, and whether each may run: it is not stopped by a signal."""
    states = {pid: process_state(pid) for pid in pids}
    return [(pid, state not in "Tt") for pid, state in states.items() if state and state not in "ZX"]


class Worker:
    """The actor."""

    def __init__(self) -> None:
        self._server = Server()

    def hello(self) -> bytes:
        """Who and where this is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return bytes(wire.encode([fingerprint(), os.getpid(), machine(), node]))

    def take(self, kind: int, number: int, frame: bytes) -> bytes:
        """Act on a message. The answer is a frame and its kind; behind, so that arrays stay where they are aligned."""
        if kind == Kind.WELCOME:
            # What the runtime environment has brought comes before what the head has at the same place.
            settings = wire.decode(frame)
            settings["path"] = [*sys.path, *(entry for entry in settings["path"] if entry not in sys.path)]
            frame = bytes(wire.encode(settings))
        reply = self._server.handle(Message(kind, number, frame))
        return b"" if reply is None else bytes(reply.frame) + bytes([reply.kind])


class Watcher:
    """An actor on each other machine that looks at the process table: a worker that is at work cannot answer."""

    def living(self, pids: bytes) -> bytes:
        """`living` there."""
        return bytes(wire.encode([list(one) for one in living(wire.decode(pids))]))

    def kill(self, pid: int) -> None:
        """End a worker that does not end by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# The head's side ----------------------------------------------------------------------------------------------


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
        session: _Session,
        workers: int | None,
        demand: Mapping[str, float],
        placement: str,
        runtime_env: dict[str, Any],
    ) -> None:
        self._session, self._ray = session, session.ray
        self._fixed, self._demand, self._placement = workers, demand, placement
        self._options: dict[str, Any] = {
            "num_cpus": demand["CPU"],
            "resources": {name: amount for name, amount in demand.items() if name != "CPU"},
        }
        if runtime_env != session.runtime_env:  # that of another engine, or of the user's own `ray.init`
            self._options["runtime_env"] = runtime_env | {"env_vars": ENVIRONMENT | runtime_env.get("env_vars", {})}
        elif not session.started:  # a Ray of our own was started with these variables
            self._options["runtime_env"] = {"env_vars": ENVIRONMENT}
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
        chosen = (max if self._placement == "pack" else min)(room, key=lambda name: (room[name], name))
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
            return self._gone(number, _brief(error))
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
        if actor.pid and actor.machine == self._machine:  # one that was stopped does not hear Ray
            with contextlib.suppress(ProcessLookupError):
                os.kill(actor.pid, signal.SIGKILL)
        elif actor.node in self._watchers:
            self._watchers[actor.node].handle.kill.options(num_returns=0).remote(actor.pid)

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


class _Session:
    """This process's connection to Ray, for all engines that are open. Its thread starts Ray and stops it:
    the kernel ends Ray's processes with the thread that started them."""

    _open: _Session | None = None
    _lock = threading.Lock()

    def __init__(self, address: str | None, cpus: float, runtime_env: dict[str, Any]) -> None:
        if _is_local(address) and "ray" not in sys.modules:  # read when it is loaded
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        with _variables(_LOOPBACK if _is_local(address) else {}):
            import ray

        self.ray: Any = ray
        self.address = address
        self.runtime_env = runtime_env
        """What all workers of this session have, on every node."""
        self.users = 0
        self.started = False
        """Whether Ray runs for this process alone."""
        self._left = threading.Event()
        if ray.is_initialized():  # the user's own: used as it is, and left as it is
            self._thread, self.runtime_env = None, {}
            return
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(address, cpus, ready), name="shoal-ray", daemon=True)
        self._thread.start()
        ready.result()

    @classmethod
    def join(cls, address: str | None, cpus: float, runtime_env: dict[str, Any]) -> _Session:
        """The one that is open, or a new one."""
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra(f"the ray engine needs Ray. To install it, type: {INSTALL}")
        with cls._lock:
            if cls._open is None:
                cls._open = cls(address, cpus, runtime_env)
            elif not _is_local(address) and address != cls._open.address:
                raise UsageError(
                    f"an engine of this process is on another Ray ({cls._open.address or 'of this machine alone'}), so "
                    f"{address} cannot be joined. Close that engine first"
                )
            cls._open.users += 1
            return cls._open

    def leave(self) -> None:
        """An engine is done with it."""
        with self._lock:
            self.users -= 1
            if self.users:
                return
            type(self)._open = None
            self._left.set()
            if self._thread is not None:
                self._thread.join()

    def _live(self, address: str | None, cpus: float, ready: Future[None]) -> None:
        """Start or join Ray; stop or leave it when the last engine has closed."""
        try:
            with contextlib.ExitStack() as stack:
                options: dict[str, Any] = {"logging_level": logging.ERROR}
                options |= {"log_to_driver": log.isEnabledFor(logging.DEBUG)}
                options |= {"runtime_env": self.runtime_env} if self.runtime_env else {}
                if _is_local(address):
                    keeper = Keeper()
                    stack.callback(keeper.close)
                    stack.callback(self.ray.shutdown)
                    self._start(keeper, cpus, options)
                else:
                    stack.callback(self.ray.shutdown)
                    self._connect(str(address), options)
                if not log.isEnabledFor(logging.DEBUG):
                    self._hush()
                ready.set_result(None)
                self._left.wait()
        except BaseException as error:
            if ready.done():
                log.exception("Ray could not be stopped")
            else:
                ready.set_exception(error)

    def _start(self, keeper: Keeper, cpus: float, options: dict[str, Any]) -> None:
        self.started = True
        folder = tempfile.mkdtemp(prefix="shoal-ray-", dir=FOLDERS)
        keeper.remove(folder)
        with (
            _variables(ENVIRONMENT | keeper.variables | {"PYTHONPATH": python_path()} | RAY_ENVIRONMENT),
            warnings.catch_warnings(),
        ):
            # Ray forks to start its processes, which become other programs at once. JAX warns of those that do not.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            try:
                self.ray.init("local", num_cpus=cpus, include_dashboard=False, _temp_dir=folder, **options)
            except Exception as error:
                raise EngineError(
                    f"Ray could not be started: {_brief(error)}. Likely causes: too little memory, or a full disk ("
                    f"{FOLDERS}, and shared memory)"
                ) from error

    def _hush(self) -> None:
        """Ray prints half a page for each worker that is lost, which Shoal says in one line. Ends what prints."""
        with contextlib.suppress(AttributeError):  # another version of Ray; then it prints
            worker = self.ray._private.worker.global_worker
            worker.threads_stopped.set()  # first: without it the thread would ask a closed subscriber again and again
            worker.gcs_error_subscriber.close()

    def _connect(self, address: str, options: dict[str, Any]) -> None:
        host, _, port = address.rpartition(":")
        if address.startswith("ray://"):
            raise UsageError(
                f"RAY_ADDRESS={address} is the address of a Ray client server, by which nodes cannot be reached. "
                f"Give the cluster's own: HOST:PORT, where PORT is 6379 unless told (--engine ray://HOST:PORT)"
            )
        if address != "auto":
            _demand_token(host)
            try:
                socket.create_connection((host, int(port)), timeout=_CONNECT).close()
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"no Ray cluster answers at {address}: {error}. Start one with `ray start --head` or `shoal up`"
                ) from None
        try:
            self.ray.init(address, **options)
        except Exception as error:
            raise UsageError(
                f"the Ray cluster at {address} could not be joined: {_brief(error)}. This machine has to be one of its "
                f"nodes; to make it one that only learns, type: ray start --address={address} --num-cpus=0"
            ) from None
        _demand_token(self.ray.get_runtime_context().gcs_address.rpartition(":")[0])


def _take_signals_back() -> None:
    """Ray's C++ code answers SIGTERM by ending the process, past Python: a head would not save."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _is_local(address: str | None) -> bool:
    return address in (None, "", "local")


def _demand_token(host: str) -> None:
    """Whoever reaches a Ray without tokens can run code on it, and on whoever joins it."""
    if _is_loopback(host):
        return
    mode = os.environ.get("RAY_AUTH_MODE")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if mode is None and ("RAY_AUTH_TOKEN" in os.environ or path.is_file()):
        return  # Ray uses it
    if mode is None or mode.lower() != "token":
        raise UsageError(
            f"the Ray cluster at {host} is on a network, and Ray's token authentication is off: anyone who reaches it "
            f"could run code here. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token, on "
            f"every node and here (`ray get-auth-token --generate` makes one; `shoal up` does all of it)"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what is started inside of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _how(error: BaseException) -> str:
    """How a worker was lost. Ray's reports are pages long."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "OUT_OF_MEMORY" in text:
        return "was ended because its node ran out of memory"
    if "node has died" in text or "NODE_DIED" in text:
        return "went with its node"
    return "died" if type(error).__name__ in ("ActorDiedError", "RayActorError") else _brief(error)


def _brief(error: BaseException) -> str:
    """The end of a report of Ray, where what happened stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"


def _amounts(demand: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in demand.items())


def _cannot_start(reason: str) -> EngineError:
    return EngineError(
        f"workers cannot be started: {_FAILED_STARTS} Ray actors in a row ended before they were ready (the last one: "
        f"{reason}). Likely causes: Shoal or a package is not installed on the nodes, or the runtime environment is "
        f"wrong. To see more, type: shoal doctor"
    )
