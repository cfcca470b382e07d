"""Threads are set before NumPy and JAX load, as the command line does; no test may leave a process behind."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["NPROC"] = "1"

import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.hosts import two_hosts

__all__ = ["two_hosts"]


STARTS_PROCESSES = {"processes", "mpi", "ray", "redis", "slow"}
_started: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if args and args[0] == "fc-list":  # Matplotlib lists the fonts once on every new machine
        return
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
        _started.append(f"{event} {args[0] if args else ''}")


sys.addaudithook(_watch)


def _may_start_processes(request: pytest.FixtureRequest) -> bool:
    return bool(STARTS_PROCESSES & {mark.name for mark in request.node.iter_markers()})


@pytest.fixture(autouse=True)
def processes_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only marked tests start processes, so that `make quick` stays quick."""
    _started.clear()
    yield
    if not _may_start_processes(request):
        assert not _started, "this test starts processes: mark it with @pytest.mark.processes"


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every worker that a test started is gone when it ends."""
    if not _may_start_processes(request):  # looking at all processes takes longer than many tests
        yield
        return
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, timeout=15)
    assert not [process.cmdline() for process in alive if process.is_running()]
