"""Learn in a child process, on an engine of this process.

XLA fixes its number of threads at a process's first JAX computation, and that number changes bits. So where this
process has used JAX already, or has learned with another number of threads, an algorithm runs in a child process: its
steps come back over a socket, its tasks go to the engine here over a second one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypedDict

from shoal.algos.base import AlgorithmConfig, Step
from shoal.base.host import WORKER_ENVIRONMENT, module_command, python_path
from shoal.base.lifetime import die_with_parent
from shoal.base.trees import Tree
from shoal.engines import wire
from shoal.engines.base import Engine
from shoal.engines.proxy import EngineProxy, EngineServer
from shoal.engines.wire import ErrorBody, Kind, Message
from shoal.engines.worker import SocketChannel, describe_error, task_error
from shoal.envs.make import EnvRecord, EnvSpec
from shoal.errors import EngineError
from shoal.learning import xla
from shoal.policies.policy import Policy, PolicyRecord, SavedPolicy, Weights
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec, make_config
from shoal.spmd.launching import without_rank

_CLOSING = 10.0  # seconds that a child has to end by itself


class Assignment(TypedDict):
    """What the child is started with."""

    algo: str
    settings: dict[str, Any]
    """Fields of `Settings`."""
    config: dict[str, Any]
    """Fields of the algorithm's settings."""
    env: EnvRecord
    """The environment as the parent knows it: `__main__` would be another module in the child."""
    workers: int
    """Number of workers of the engine."""
    path: list[str]
    """`sys.path` of the parent."""
    state: Tree | None


class StepRecord(TypedDict):
    """A `Step` on its way to the parent, without its state, which the parent asks for when it saves."""

    metrics: dict[str, float]
    learned: Tree
    policy: PolicyRecord
    weights: Weights
    env: dict[str, Any]


class LearnerProcess:
    """The steps of an algorithm that runs in a child process. A context manager: the child ends with the block."""

    def __init__(self, spec: RunSpec, config: AlgorithmConfig, engine: Engine, state: Tree | None) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[Any]] = {}
        ours, theirs = socket.socketpair()
        engine_ours, engine_theirs = socket.socketpair()
        with theirs, engine_theirs:
            self._process = _start(theirs, engine_theirs)
        self._socket, self._channel = ours, SocketChannel(ours)
        server = EngineServer(engine, engine_ours, f"learner {self._process.pid}")
        self._threads = [
            threading.Thread(target=server.serve, name="shoal-learner-engine", daemon=True),
            threading.Thread(target=self._read, name="shoal-learner", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        assignment: Assignment = {
            "algo": spec.algo,
            "settings": asdict(spec.settings),
            "config": asdict(config),
            "env": spec.settings.env_spec.to_record(),
            "workers": engine.workers,
            "path": list(sys.path),
            "state": state,
        }
        self._send(Message(Kind.WELCOME, 0, wire.encode(assignment, "the state to learn from")))

    def __enter__(self) -> LearnerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # the child closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def steps(self) -> Iterator[Step]:
        """Have the child learn one iteration at a time."""
        while True:
            number, answer = self._ask(Kind.TASK)
            record: StepRecord = answer.result()
            policy = SavedPolicy(Policy.from_record(record["policy"]), record["weights"], record["env"])
            yield Step(record["metrics"], record["learned"], lambda number=number: self._state(number), policy)  # type: ignore[misc]

    def _state(self, step: int) -> Tree:
        _, answer = self._ask(Kind.SHARE, step)
        state: Tree = answer.result()
        return state

    def _ask(self, kind: Kind, body: object = None) -> tuple[int, Future[Any]]:
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            self._answers[number] = answer
        self._send(Message(kind, number, wire.encode(body)))
        return number, answer

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise self._death() from None

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._channel.receive()) is not None:
                body = wire.decode(message.frame)
                with self._lock:
                    answer = self._answers.pop(message.number)
                if message.kind == Kind.DONE:
                    answer.set_result(body)
                else:
                    answer.set_exception(task_error(body, "the learner"))
        with self._lock:
            left = list(self._answers.values())
            self._answers.clear()
        for answer in left:
            answer.set_exception(self._death())

    def _death(self) -> EngineError:
        code = self._process.wait(_CLOSING)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return EngineError(f"the process that learns has died ({how}). If it was killed, memory may have run out")


def _start(steps: socket.socket, engine: socket.socket) -> subprocess.Popen[bytes]:
    numbers = [steps.fileno(), engine.fileno()]
    return subprocess.Popen(
        module_command("shoal.runs.learner_process", *map(str, numbers), str(os.getpid())),
        pass_fds=numbers,
        env=without_rank(os.environ) | WORKER_ENVIRONMENT | {"PYTHONPATH": python_path()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is for the parent, which saves the run
    )


class _Child:
    """The child's side: learns when asked, and keeps the last two steps, whose states the parent may ask for."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, Step]] = deque(maxlen=2)

    def learn(self, steps: Iterator[Step]) -> None:
        """Answer until the parent closes the connection."""
        threading.Thread(target=self._listen, daemon=True).start()
        while (number := self._wanted.get()) is not None:
            try:
                step = next(steps)
            except Exception as error:  # anything that an algorithm raises is raised again by the parent
                self._answer(Kind.FAILED, number, describe_error(error))
                continue
            self._kept.append((number, step))
            policy = step.policy
            record: StepRecord = {
                "metrics": step.metrics,
                "learned": step.learned,
                "policy": policy.policy.to_record(),
                "weights": policy.weights,
                "env": dict(policy.env),
            }
            self._answer(Kind.DONE, number, record)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._channel.receive()) is not None:
                if message.kind == Kind.TASK:
                    self._wanted.put(message.number)
                    continue
                kept = dict(self._kept)
                self._answer(Kind.DONE, message.number, kept[wire.decode(message.frame)].state())
        self._wanted.put(None)

    def _answer(self, kind: Kind, number: int, body: StepRecord | ErrorBody | Tree) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError):  # the parent is gone, which `_listen` notices
            self._channel.send(Message(kind, number, wire.encode(body, "the state of the run")))


def main() -> None:
    """Learn for the parent. Arguments: the sockets for steps and for the engine, and the parent's process id."""
    steps, tasks = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    die_with_parent(int(sys.argv[3]))
    for connection in (steps, tasks):
        connection.set_inheritable(False)
    channel = SocketChannel(steps)
    message = channel.receive()
    if message is None:
        return
    given: Assignment = wire.decode(message.frame)
    with EngineProxy(tasks, given["workers"]) as engine:
        _Child(channel).learn(_steps(given, engine))


def _steps(given: Assignment, engine: Engine) -> Iterator[Step]:
    """Prepare and learn. The parent receives any error of either as that of a step."""
    sys.path[:] = given["path"]
    settings = Settings(**given["settings"])
    spec = RunSpec(given["algo"], settings, make_config(given["algo"], given["config"]))
    xla.start(settings.learner_threads or 1, settings.device)
    yield from spec.steps(spec.config, engine, given["state"], EnvSpec.from_record(given["env"]))


if __name__ == "__main__":
    main()
