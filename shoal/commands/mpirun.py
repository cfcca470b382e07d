"""Running a run under mpirun, and again from its last checkpoint when a rank dies.

MPI ends the whole job with a rank. So what is started here is always `shoal resume`: first from nothing, then from
wherever the run got to.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from shoal.base import signals
from shoal.base.host import WORKER_ENVIRONMENT, available_cores, shoal_command
from shoal.base.lifetime import die_with_parent
from shoal.engines.mpi import LOST
from shoal.runs.folder import RunDir
from shoal.spmd.launching import mpirun

log = logging.getLogger("shoal.mpirun")


def train_under_mpirun(run: RunDir, workers: int | None, restarts: int, goal: Sequence[str] = ()) -> int:
    """Train a run to its end under mpirun; the exit code is that of its head."""
    command = mpirun(1 + (workers or available_cores()))
    command += shoal_command("resume", str(run.path.resolve()), "--engine", "mpi", *goal)
    for left in range(restarts, -1, -1):
        code, stopped_by = _run(command)
        if stopped_by:
            return 128 + stopped_by
        if code <= 128 and code != LOST:
            return code
        if left:
            newest = max(run.saved(), default=0)
            log.warning(
                "a rank was lost (exit code %d); starting again from iteration %d (%d left)", code, newest, left
            )
    log.error("ranks were lost %d times; no more starts. To go on, type: shoal resume %s", restarts + 1, run.path)
    return code


def _run(command: list[str]) -> tuple[int, int]:
    """Exit code of mpirun, and the signal by which this process was told to stop or 0."""
    stopped_by = 0
    with subprocess.Popen(
        command,
        env=os.environ
        | WORKER_ENVIRONMENT
        | ({} if sys.stdout.isatty() else {"TERM": "dumb"}),  # ranks write to a terminal
        start_new_session=True,  # a terminal's Ctrl-C is for this process, which passes it on in its own way
        preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - no other thread runs yet
    ) as job:

        def pass_on(number: int, _: object) -> None:
            nonlocal stopped_by
            stopped_by = number
            # mpirun answers SIGTERM by killing its ranks a quarter of a second later. This one it only passes on, and
            # the head takes the time that it needs to save.
            job.send_signal(signal.SIGUSR2)

        with signals.handled_by(pass_on, (signal.SIGINT, signal.SIGTERM)):
            code = job.wait()
    return (128 - code if code < 0 else code), stopped_by
