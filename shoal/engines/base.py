"""The engine contract: `share`, `submit`, `map` and `close`, with futures from `concurrent.futures`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from shoal.engines.scheduler import Telemetry
from shoal.engines.user_code import refuse_while_imported
from shoal.engines.wire import Shared


class Engine(abc.ABC):
    """Runs tasks on workers.

    A task is a module-level function and arguments made of None, bool, int, float, str, bytes, list, tuple, dict and
    NumPy arrays. It should be pure: its result depends on its arguments alone, so that it does not matter which worker
    runs it, or how often.

        with shoal.engine("processes", workers=8) as engine:
            weights = engine.share(policy)                    # sent once to each worker
            scores = engine.map(rollout, seeds, weights)      # rollout(seed, policy) for each seed, in order
    """

    workers: int
    """Number of workers that this engine is to have."""

    def __init__(self, workers: int) -> None:
        refuse_while_imported()
        self.workers = workers

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that this engine runs on this machine, oldest first."""
        return []

    @property
    def shared_cores(self) -> int | None:
        """Cores that this engine's workers share; None where the workers' cores are not known to the head."""
        return None

    @abc.abstractmethod
    def share(self, value: object) -> Shared:
        """Prepare a value to be sent once to each worker that needs it. Pass the result to tasks in its place."""

    @abc.abstractmethod
    def submit(self, function: Callable[..., object], /, *args: object, key: Hashable = None) -> Future[Any]:
        """Run `function(*args)` on a worker. Tasks with equal keys prefer the same worker."""

    def map(self, function: Callable[..., object], items: Iterable[object], /, *args: object) -> list[Any]:
        """Return `[function(item, *args) for item in items]`, computed on the workers, in the order of the items."""
        futures = [self.submit(function, item, *args) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers. Unfinished tasks fail with `EngineClosed`. Closing twice is fine."""

    @abc.abstractmethod
    def telemetry(self) -> Telemetry:
        """Return counters since the start: tasks, busy seconds, lost workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workers={self.workers}, {asdict(self.telemetry())})"
