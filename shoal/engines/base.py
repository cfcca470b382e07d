"""The engine contract: four methods that every engine has, and real `concurrent.futures.Future`s."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from shoal.engines.functions import refuse_while_loading
from shoal.engines.scheduler import Telemetry
from shoal.engines.wire import Shared


class Engine(abc.ABC):
    """Gives tasks to workers.

    A task is a module-level function and arguments made of None, bool, int, float, str, bytes, list, tuple, dict and
    NumPy arrays. It should be pure: what it returns depends on its arguments alone. Then it does not matter which
    worker runs it, or how often.

        with shoal.engine("processes", workers=8) as engine:
            weights = engine.share(policy)                    # shipped once to each worker
            scores = engine.map(rollout, seeds, weights)      # rollout(seed, policy) for each seed, in order
    """

    workers: int
    """How many workers this engine was asked to have."""

    def __init__(self, workers: int) -> None:
        refuse_while_loading()
        self.workers = workers

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that this engine runs on this machine, oldest first."""
        return []

    @abc.abstractmethod
    def share(self, value: Any) -> Shared:
        """Ship a value once to each worker that needs it; pass the result to tasks in its place."""

    @abc.abstractmethod
    def submit(self, function: Callable[..., Any], /, *args: Any, key: Hashable = None) -> Future[Any]:
        """Run `function(*args)` on a worker. Tasks with equal keys prefer the same worker."""

    def map(self, function: Callable[..., Any], items: Iterable[Any], /, *args: Any) -> list[Any]:
        """`[function(item, *args) for item in items]`, on the workers; results in the order of the items."""
        futures = [self.submit(function, item, *args) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers. Tasks that are not done fail with `EngineClosed`. Closing twice is fine."""

    @abc.abstractmethod
    def telemetry(self) -> Telemetry:
        """Counters since the start: tasks, busy seconds, lost workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workers={self.workers}, {asdict(self.telemetry())})"
