"""Train a run under mpirun, and restart it from its last checkpoint when a rank dies.

MPI ends the whole job with a rank. So mpirun always starts `shoal resume`: at first on a run without a checkpoint.
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
from shoal.errors import UsageError
from shoal.runs import run
from shoal.runs.folder import RunDir
from shoal.runs.spec import RunSpec
from shoal.spmd.launching import launched_rank, mpirun

log = logging.getLogger("shoal.mpirun")


def is_needed(engine: str) -> bool:
    """Test whether this process has to start mpirun for its ranks; refuse a rank that has another engine."""
    here = launched_rank(os.environ)
    alone = here is None or here.size == 1
    if not alone and engine != "mpi":
        raise UsageError(f"this process is a rank of an MPI job, but the engine is {engine}. Use --engine mpi")
    return engine == "mpi" and alone


def train_under_mpirun(spec: RunSpec) -> int:
    """Train a new run to its goal under mpirun and return the exit code of its head."""
    created, _ = run.create(spec)
    return train_created(created, spec)


def train_created(created: RunDir, spec: RunSpec) -> int:
    """Train a run that has a folder but no iteration yet, as `train_under_mpirun`."""
    code = UsageError.exit_code
    try:
        code = resume_under_mpirun(created, spec.settings.workers, spec.settings.restarts)
    finally:
        if code == UsageError.exit_code:  # no mpirun, or refused by the head: a run that cannot begin must not keep
            created.discard()  # its name
    return code


def resume_under_mpirun(folder: RunDir, workers: int | None, restarts: int, goal: Sequence[str] = ()) -> int:
    """Train a run to its goal under mpirun and return the exit code of its head; `goal` are flags of a new goal."""
    command = mpirun(1 + (workers or available_cores()))
    command += shoal_command("resume", str(folder.path.resolve()), "--engine", "mpi", *goal)
    for left in range(restarts, -1, -1):
        code, stopped_by = _run(command)
        if stopped_by:
            return 128 + stopped_by
        if code <= 128 and code != LOST:
            return code
        if left:
            newest = max(folder.saved(), default=0)
            log.warning(
                "a rank was lost (exit code %d); restarting from iteration %d (%d restarts left)", code, newest, left
            )
    log.error(
        "ranks were lost %d times, so the run was not restarted again. To continue it, run: shoal resume %s",
        restarts + 1,
        folder.path,
    )
    return code


def _run(command: list[str]) -> tuple[int, int]:
    """Return the exit code of mpirun, and the signal that asked this process to stop or 0."""
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
            # On SIGTERM, mpirun kills its ranks after a quarter of a second. SIGUSR2 is only passed on, so the head has
            # the time to save.
            job.send_signal(signal.SIGUSR2)

        with signals.handled_by(pass_on, (signal.SIGINT, signal.SIGTERM)):
            code = job.wait()
    return (128 - code if code < 0 else code), stopped_by
