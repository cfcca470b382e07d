"""Runs that learn at the same time, each in a process of its own, on one engine that is lent to all of them.

A process for each, because much of what a result depends on belongs to a process: the learner's threads, and the
random numbers of libraries that keep theirs to themselves. So each run is, bit for bit, what it is alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, Protocol

from shoal.base.host import WORKER_ENVIRONMENT, module_command, python_path
from shoal.commands.compare.plan import ComparedRun
from shoal.engines.base import Engine
from shoal.engines.proxy import EngineServer
from shoal.errors import Stopped


class ComparisonListener(Protocol):
    """Told what happens to the runs, by several threads."""

    def began(self, job: ComparedRun) -> None:
        """A run begins, or goes on."""

    def progress(self, job: ComparedRun, steps: int, score: float | None) -> None:
        """How far a run is, and its mean return."""

    def said(self, job: ComparedRun, text: str) -> None:
        """Something about a run that a person should read."""

    def ended(self, job: ComparedRun, failure: str) -> None:
        """A run has reached its goal, or failed."""


def train_all(
    jobs: Sequence[ComparedRun], engine: Engine, at_once: int, watcher: ComparisonListener
) -> dict[ComparedRun, str]:
    """Bring all runs to their goals, so many at once. What failed, and why; `Stopped` once all have saved."""
    heads = _Heads(engine, watcher)
    with ThreadPoolExecutor(at_once, thread_name_prefix="shoal-head") as pool:
        futures = {pool.submit(heads.learn, job): job for job in jobs}
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except Stopped:
            for future in futures:
                future.cancel()
            heads.stop()
            raise  # after the pool's threads have seen their heads end
        return {job: failure for future, job in futures.items() if (failure := future.result())}


class _Heads:
    def __init__(self, engine: Engine, watcher: ComparisonListener) -> None:
        self._engine, self._watcher = engine, watcher
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def learn(self, job: ComparedRun) -> str:
        """Bring one run to its goal. Empty, or why it failed."""
        if job.finished:
            return ""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._stopping:
                ours.close()
                return ""
            process = _start(job, theirs, self._engine.workers)
            self._processes.add(process)
        self._watcher.began(job)
        server = threading.Thread(target=EngineServer(self._engine, ours, str(job)).serve, daemon=True)
        server.start()
        said = self._read(job, process)
        code = process.wait()
        server.join()
        with self._lock:
            self._processes.remove(process)
        failure = "" if code == 0 or self.stopping else "\n".join(said) or _end(code)
        for line in [] if failure else said:
            self._watcher.said(job, line)
        if not self.stopping:
            self._watcher.ended(job, failure)
        return failure

    def _read(self, job: ComparedRun, process: subprocess.Popen[str]) -> list[str]:
        """Pass on how far a head is, until it ends. What else it said, for people."""
        said: list[str] = []
        for line in process.stdout or ():
            known = parse_progress(line)
            if known is not None:
                self._watcher.progress(job, *known)
            elif line.strip():
                said.append(line.strip())
        return said

    @property
    def stopping(self) -> bool:
        """Whether heads were told to end."""
        return self._stopping

    def stop(self) -> None:
        """Have all heads save and end."""
        with self._lock:
            self._stopping = True
            for process in self._processes:
                process.send_signal(signal.SIGTERM)


def _start(job: ComparedRun, theirs: socket.socket, workers: int) -> subprocess.Popen[str]:
    description: dict[str, Any] = {
        "algo": job.algo,
        "settings": asdict(job.settings),
        "config": asdict(job.config),
        "workers": workers,
        "path": list(sys.path),
    }
    command = module_command("shoal.commands.compare.head", str(theirs.fileno()), json.dumps(description))
    # A rank's variables would make whoever reads them take this process for the rank.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "PMI_"))}
    return subprocess.Popen(
        command,
        pass_fds=[theirs.fileno()],
        env=environment | WORKER_ENVIRONMENT | {"PYTHONPATH": python_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C is for the owner, which tells its heads once
    )


def _end(code: int) -> str:
    return (
        f"its process died ({signal.Signals(-code).name})" if code < 0 else f"its process ended with exit code {code}"
    )


def parse_progress(line: str) -> tuple[int, float | None] | None:
    """Steps and return, if that is what a head says; optimizers print lines of their own."""
    try:
        known = json.loads(line)
        return known["steps"], known["return"]
    except (ValueError, TypeError, KeyError):
        return None
