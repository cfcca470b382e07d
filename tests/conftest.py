"""Set before NumPy and JAX load, as the command line does; and no test may leave a process behind."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["NPROC"] = "1"

from collections.abc import Iterator

import psutil
import pytest

from tests.support.hosts import two_hosts

__all__ = ["two_hosts"]


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Every worker that a test started is gone when it ends."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, timeout=15)
    assert not [process.cmdline() for process in alive if process.is_running()]
