"""Every error that Shoal raises on purpose.

A message states what happened, with which values, the likely cause and the command to run next. `exit_code` is the
exit status of the command line: 2 for what the caller can fix (settings, environment, files), 1 for everything else.

    ShoalError
    ├── UsageError            a setting, name or value that cannot be used; lists every problem found
    │   ├── MissingExtra      an optional package is not installed
    │   ├── RanksDiffer       the ranks of a script passed incompatible values to one call; raised on all of them
    │   ├── NotNameable       a function that no worker can find by name (lambda, closure, method)
    │   └── WireError         a value that cannot be sent, or bytes that are not a message
    ├── EnvironmentFault      the environment raised, returned NaN or never ended
    ├── CheckpointFault       no checkpoint of the run can be read
    ├── RunBusy               another process is training this run
    ├── LearningFault         an update produced non-finite numbers
    ├── DiskFault             a run could not be written
    └── EngineError           something went wrong between the head and its workers
        ├── TaskFailed        the task raised; carries the worker's traceback
        ├── PoisonTask        several workers died while they ran the task
        ├── NoWorkers         no worker connected in time to run it
        ├── WorkerRefused     a worker's versions or arithmetic differ from the head's
        └── EngineClosed      the engine was closed before the task finished
    Stopped                   not an error: SIGINT, SIGTERM or SIGUSR2
"""

from __future__ import annotations

import signal
from collections.abc import Sequence


class Stopped(BaseException):
    """A signal asked the run to stop. Not an Exception, so that no handler on the way takes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class ShoalError(Exception):
    """Root of all errors that Shoal raises on purpose."""

    exit_code = 1


class UsageError(ShoalError):
    """One or more problems that the caller has to fix; `problems` lists all of them."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class MissingExtra(UsageError):
    """An optional package is needed and not installed."""


class RanksDiffer(UsageError):
    """The ranks of a script passed incompatible values to one call of `shoal.spmd`. Raised on all of them."""


class NotNameable(UsageError):
    """A function has no importable name, so no worker can find it."""


class WireError(UsageError):
    """A value cannot be sent, or received bytes are not a valid message."""


class EnvironmentFault(ShoalError):
    """The environment raised, returned non-finite numbers, or never ended an episode."""

    exit_code = 2


class CheckpointFault(ShoalError):
    """A run folder holds no readable checkpoint."""

    exit_code = 2


class RunBusy(ShoalError):
    """Another process is training the run."""

    exit_code = 2


class LearningFault(ShoalError):
    """An update produced non-finite numbers; nothing of it was kept."""


class DiskFault(ShoalError):
    """Files of a run could not be written."""


class EngineError(ShoalError):
    """Something went wrong between the head and its workers."""


class TaskFailed(EngineError):
    """A task raised. `remote_traceback` is the traceback on the worker."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{remote_traceback}" if remote_traceback else message)
        self.remote_traceback = remote_traceback


class PoisonTask(EngineError):
    """A task was running on several workers when they died."""


class NoWorkers(EngineError):
    """Tasks waited too long for a worker to connect."""


class WorkerRefused(EngineError):
    """A worker's versions or arithmetic differ from the head's."""


class EngineClosed(EngineError):
    """The engine was closed before the task finished."""


def problem_list(error: ShoalError) -> list[str]:
    """List the problems of an error, to print one per line."""
    return error.problems if isinstance(error, UsageError) else [str(error)]
