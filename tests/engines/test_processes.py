import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal
from shoal.engines.processes import ProcessesEngine
from shoal.errors import EngineError, WorkerRefused
from tests.engines.contract import WorkersContract
from tests.support import tasks

pytestmark = pytest.mark.processes


class TestProcesses(WorkersContract):
    def make(self, **options: Any) -> shoal.Engine:
        return shoal.engine("processes", **{"workers": 2, **options})


def test_worker_with_other_arithmetic_is_refused() -> None:
    with ProcessesEngine(1, environment={"OPENBLAS_CORETYPE": "Nehalem"}) as engine:
        with pytest.raises(WorkerRefused, match=r"canary: head \w+, worker \w+.*--allow-mixed"):
            engine.submit(tasks.echo, 1).result(30)


def test_worker_with_other_arithmetic_may_be_allowed() -> None:
    with ProcessesEngine(1, environment={"OPENBLAS_CORETYPE": "Nehalem"}, allow_mixed=True) as engine:
        assert engine.submit(tasks.echo, 1).result(30) == 1


def test_workers_that_cannot_start() -> None:
    with ProcessesEngine(1, environment={"PYTHONHOME": "/nowhere"}) as engine:
        with pytest.raises(EngineError, match=r"3 in a row ended.*shoal doctor"):
            engine.submit(tasks.echo, 1).result(60)


def test_children_of_a_worker_end_with_it() -> None:
    with shoal.engine("processes", workers=1) as engine:
        child = engine.submit(tasks.leave_child, "").result(30)
        assert psutil.pid_exists(child)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


SCRIPT = """
    import os, time
    import shoal

    def work(x):
        return x * x

    def sleepy(x):
        time.sleep(600)

    {body}
"""


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).replace("{body}", textwrap.dedent(body)))
    return [sys.executable, str(path)]


def test_functions_of_a_script(tmp_path: Path) -> None:
    body = """
    if __name__ == "__main__":
        with shoal.engine("processes", workers=1) as engine:
            print(engine.map(work, range(4)))
    """
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[0, 1, 4, 9]\n"


def test_script_without_a_guard_gets_an_error(tmp_path: Path) -> None:
    body = """
    with shoal.engine("processes", workers=1) as engine:
        print(engine.map(work, range(4)))
    """
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr


def test_engine_that_is_never_closed_ends_with_its_process(tmp_path: Path) -> None:
    body = """
    if __name__ == "__main__":
        engine = shoal.engine("processes", workers=2)
        engine.map(work, range(4))
        engine.submit(sleepy, 1)
        print(*engine.pids)
    """
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, check=True, timeout=60)
    assert_gone(done.stdout)


def test_killed_head_leaves_no_workers(tmp_path: Path) -> None:
    body = """
    if __name__ == "__main__":
        engine = shoal.engine("processes", workers=2)
        engine.map(work, range(4))
        futures = [engine.submit(sleepy, 1) for _ in range(2)]
        print(*engine.pids, flush=True)
        futures[0].result()
    """
    with subprocess.Popen(script(tmp_path, body), stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        pids = head.stdout.readline()
        assert all(psutil.pid_exists(int(pid)) for pid in pids.split())
        os.kill(head.pid, signal.SIGKILL)
    assert_gone(pids)


def assert_gone(pids: str) -> None:
    assert pids.split()
    deadline = time.monotonic() + 20
    for pid in map(int, pids.split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"worker {pid} is still there"
            time.sleep(0.01)
