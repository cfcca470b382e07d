"""Every error that Shoal raises on purpose.

A message says what happened, with which values, the likely cause and what to type next. `exit_code` is what the
command line ends with: 2 for what the caller can mend (settings, environment, files), 1 for everything else.

    ShoalError
    ├── UsageError            a setting, name or value that cannot be used; lists every problem found
    │   ├── MissingExtra      an optional package is not installed
    │   ├── RanksDiffer       what the ranks of a script bring to one call does not fit; raised on all of them
    │   ├── NotNameable       a function that no worker could find again (lambda, closure, method)
    │   └── WireError         a value that cannot be sent, or bytes that are not a message
    ├── EnvironmentFault      the environment raised, returned NaN or never ended
    ├── CheckpointFault       no checkpoint of the run can be read
    ├── RunBusy               another process is training this run
    ├── LearningFault         the update produced numbers that are not finite
    ├── DiskFault             a run could not be written
    └── EngineError           something went wrong between the head and its workers
        ├── TaskFailed        the task raised; carries the worker's traceback
        ├── PoisonTask        the task cost several workers their lives
        ├── NoWorkers         nobody was there to run it
        ├── WorkerRefused     a worker's versions or arithmetic differ from the head's
        └── EngineClosed      the engine was closed first
    Stopped                   not an error: SIGINT or SIGTERM
"""

from __future__ import annotations

import signal
from collections.abc import Sequence


class Stopped(BaseException):
    """A signal asked the run to end. Not an Exception, so that nothing on the way takes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class ShoalError(Exception):
    """Root of all errors raised on purpose."""

    exit_code = 1


class UsageError(ShoalError):
    """One or more things the caller has to change; all of them are listed."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class MissingExtra(UsageError):
    """An optional package is needed and not installed."""


class RanksDiffer(UsageError):
    """What the ranks of a script bring to one call (`shoal.spmd`) does not fit together. Raised on all of them."""


class NotNameable(UsageError):
    """A function has no importable name, so no worker could find it."""


class WireError(UsageError):
    """A value cannot be put on the wire, or bytes from it are not a valid message."""


class EnvironmentFault(ShoalError):
    """The environment raised, returned numbers that are not finite, or never ended."""

    exit_code = 2


class CheckpointFault(ShoalError):
    """A run folder holds no checkpoint that can be read."""

    exit_code = 2


class RunBusy(ShoalError):
    """Another process holds the run."""

    exit_code = 2


class LearningFault(ShoalError):
    """An update produced numbers that are not finite; nothing of it was kept."""


class DiskFault(ShoalError):
    """A run could not be written."""


class EngineError(ShoalError):
    """Something went wrong between the head and its workers."""


class TaskFailed(EngineError):
    """A task raised. `remote_traceback` is the traceback as the worker saw it."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{remote_traceback}" if remote_traceback else message)
        self.remote_traceback = remote_traceback


class PoisonTask(EngineError):
    """A task was running on several workers when they died."""


class NoWorkers(EngineError):
    """Tasks waited, and no worker came."""


class WorkerRefused(EngineError):
    """A worker's versions or arithmetic differ from the head's."""


class EngineClosed(EngineError):
    """The engine was closed before the task was done."""


def problem_list(error: ShoalError) -> list[str]:
    """The separate problems of an error, for printing one to a line."""
    return error.problems if isinstance(error, UsageError) else [str(error)]
