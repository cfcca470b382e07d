"""Train several runs at the same time, each in its own head process, on one engine that they share.

Each run has its own process because results depend on state of the process: the learner's threads, and the random
numbers of libraries that keep a global generator. So each run produces the same bits as it would alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, Protocol, TypedDict

from shoal.base.host import WORKER_ENVIRONMENT, module_command, python_path
from shoal.commands.campaign.runs import PlannedRun
from shoal.engines.base import Engine
from shoal.engines.proxy import EngineServer
from shoal.errors import Stopped, UsageError
from shoal.spmd.launching import launched_rank, without_rank

_SAVING = 30.0  # seconds that a head may take to save its run after its owner was killed


class CampaignHeadRecord(TypedDict):
    """What a head is started with, as JSON."""

    algo: str
    settings: dict[str, Any]
    """Fields of `Settings`."""
    config: dict[str, Any]
    """Fields of the algorithm's settings, with lists for tuples."""
    workers: int
    """Number of workers of the shared engine."""
    path: list[str]
    """`sys.path` of the owner."""
    pause: int | None
    """Environment steps at which to save and end, if the goal is not reached before."""


class RunListener(Protocol):
    """Receives the progress of all runs, from several threads."""

    def started(self, at_once: int, workers: int) -> None:
        """The engine has started."""

    def began(self, run: PlannedRun) -> None:
        """A run begins or is resumed."""

    def progress(self, run: PlannedRun, steps: int, score: float | None) -> None:
        """A run has taken this many steps and has this mean return."""

    def printed(self, run: PlannedRun, text: str) -> None:
        """A run that did not fail has printed a line."""

    def ended(self, run: PlannedRun, failure: str) -> None:
        """A run has reached its goal or the pause or, if `failure` is not empty, failed."""


def train_all(
    planned: Sequence[PlannedRun], engine: Engine, at_once: int, listener: RunListener, pause: int | None = None
) -> dict[PlannedRun, str]:
    """Train all runs to their goals, `at_once` at a time, and return why runs failed.

    With `pause`, runs save and end before their goal, at the first iteration with that many environment steps. A paused
    run holds no process, and thus no memory. Raises `Stopped` once all heads have saved.
    """
    heads = _Heads(engine, listener, pause)
    with ThreadPoolExecutor(at_once, thread_name_prefix="shoal-head") as pool:
        futures = {pool.submit(heads.train, run): run for run in planned}
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except Stopped:
            for future in futures:
                future.cancel()
            heads.stop()
            raise  # after the pool's threads have seen their heads end
        return {run: failure for future, run in futures.items() if (failure := future.result())}


def refuse_mpi_outside_a_job(command: str, engine: str, workers: int | None) -> None:
    """Refuse the mpi engine if this process is not rank 0 of several."""
    here = launched_rank(os.environ)
    if engine == "mpi" and (here is None or here.size == 1):
        ranks = 3 if workers is None else workers + 1
        raise UsageError(
            f"to {command} on the mpi engine, start the ranks yourself: mpirun -n {ranks} shoal {command} ..."
        )


class _Heads:
    def __init__(self, engine: Engine, listener: RunListener, pause: int | None) -> None:
        self._engine, self._listener, self._pause = engine, listener, pause
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def train(self, run: PlannedRun) -> str:
        """Train one run to its goal or the pause in a new head. Returns why it failed, or an empty string."""
        if run.stands(self._pause):
            return ""
        self._wait_while_busy(run)
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._stopping:
                ours.close()
                return ""
            process = _start(run, theirs, self._engine.workers, self._pause)
            self._processes.add(process)
        self._listener.began(run)
        server = threading.Thread(target=EngineServer(self._engine, ours, str(run)).serve, daemon=True)
        server.start()
        with process:  # closes the pipe
            printed = self._read(run, process)
        code = process.wait()
        server.join()
        with self._lock:
            self._processes.remove(process)
        failure = "" if code == 0 or self.stopping else "\n".join(printed) or _death(code)
        for line in [] if failure else printed:
            self._listener.printed(run, line)
        if not self.stopping:
            self._listener.ended(run, failure)
        return failure

    def _wait_while_busy(self, run: PlannedRun) -> None:
        """Wait for the head of an owner that was killed: it saves the run before it ends."""
        deadline = time.monotonic() + _SAVING
        while run.folder.busy() and not self.stopping and time.monotonic() < deadline:
            time.sleep(0.05)

    def _read(self, run: PlannedRun, process: subprocess.Popen[str]) -> list[str]:
        """Pass on the progress of a head until it ends, and return the other lines of its output."""
        printed: list[str] = []
        for line in process.stdout or ():
            known = parse_progress(line)
            if known is not None:
                self._listener.progress(run, *known)
            elif line.strip():
                printed.append(line.strip())
        return printed

    @property
    def stopping(self) -> bool:
        """Whether heads were asked to end. A property, because another thread sets it."""
        return self._stopping

    def stop(self) -> None:
        """Have all heads save and end."""
        with self._lock:
            self._stopping = True
            for process in self._processes:
                process.send_signal(signal.SIGTERM)


def _start(
    run: PlannedRun, theirs: socket.socket, workers: int, pause: int | None
) -> subprocess.Popen[str]:  # fmt: skip
    record: CampaignHeadRecord = {
        "algo": run.spec.algo,
        "settings": asdict(run.spec.settings),
        "config": asdict(run.spec.config),
        "workers": workers,
        "path": list(sys.path),
        "pause": pause,
    }
    command = module_command("shoal.commands.campaign.head", str(theirs.fileno()), json.dumps(record))
    # With the variables of a rank, libraries would take the head for that rank.
    environment = without_rank(os.environ)
    return subprocess.Popen(
        command,
        pass_fds=[theirs.fileno()],
        env=environment | WORKER_ENVIRONMENT | {"PYTHONPATH": python_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C reaches only the owner, which signals its heads once
    )


def _death(code: int) -> str:
    return (
        f"its process died ({signal.Signals(-code).name})" if code < 0 else f"its process ended with exit code {code}"
    )


def parse_progress(line: str) -> tuple[int, float | None] | None:
    """Read steps and return from a line of progress; None for any other line, such as one that an optimizer prints."""
    try:
        known = json.loads(line)
        return known["steps"], known["return"]
    except (ValueError, TypeError, KeyError):
        return None
