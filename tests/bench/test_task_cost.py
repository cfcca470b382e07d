"""Overhead of an engine per task, measured in a separate process as the bench does."""

import json
import subprocess
import sys

import pytest

from bench.engines import _task_cost

pytestmark = pytest.mark.processes


def test_a_line_of_json() -> None:
    command = [sys.executable, "-m", "bench.task_cost", "processes", "1", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 < json.loads(done.stdout)["microseconds"] < 1e6


@pytest.mark.parametrize("engine", ["processes", "mpi"])
def test_on_engines_that_the_bench_has(engine: str) -> None:
    assert 1 < _task_cost(engine, 0.1, 0) < 1e6
