"""The Ray engine. One Ray serves most tests: starting one takes seconds."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal
from shoal import engines
from shoal.engines.ray.session import SESSION_ROOT, Session
from shoal.errors import EngineError, UsageError, WorkerRefused
from shoal.runs.folder import RunDir
from tests.engines.contract import WorkersContract
from tests.support import tasks

# Ray's own warnings are not ours to fix.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}
WALK = [
    "tests.support.toys:Walk-v0",
    "--batch-steps=256",
    "--lanes=4",
    "--width=2",
    "--hidden",
    "8",
    "--value-epochs=1",
]


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    """A Ray that stays open for the engines of all tests in this module."""
    session = Session.join(None, 8.0, {})
    yield
    session.leave()


def actors() -> list[psutil.Process]:
    """Shoal's actors among the processes of Ray, which keeps idle ones in reserve."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[0].startswith(("ray::WorkerActor", "ray::NodeWatcher")):
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Every worker that a test started is gone when it ends."""
    yield
    deadline = time.monotonic() + 20
    while left := actors():
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


class TestRay(WorkersContract):
    def make(self, **options: Any) -> shoal.Engine:
        return shoal.engine("ray", **{"workers": 2, **options})


def test_all_wrong_options_are_reported_at_once() -> None:
    wrong = {"placement": "here", "num_cpus": 0, "resources": {"big": -1}, "runtime_env": "x", "colour": "red"}
    with pytest.raises(UsageError) as caught:
        shoal.engine("ray", **{name: value for name, value in wrong.items() if name != "colour"})
    assert len(caught.value.problems) == 4
    assert len(engines.engine_problems("ray://host", 2, wrong)) == 6
    assert engines.engine_problems("processes", 2, {"placement": "pack"}) == [
        "the processes engine has no options, so it does not take placement"
    ]
    assert engines.engine_problems("ray://10.0.0.1:6379", None, {"placement": "pack", "num_cpus": 0.5}) == []


def test_worker_with_other_arithmetic_is_refused() -> None:
    with shoal.engine("ray", 1, runtime_env={"env_vars": {"OPENBLAS_CORETYPE": "Nehalem"}}) as engine:
        with pytest.raises(WorkerRefused, match=r"canary: head \w+, worker \w+.*--allow-mixed"):
            engine.submit(tasks.echo, 1).result(60)


def test_workers_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('it is broken')")
    with shoal.engine("ray", 1, runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}}) as engine:
        with pytest.raises(EngineError, match=r"3 Ray actors in a row ended.*it is broken.*shoal doctor"):
            engine.submit(tasks.echo, 1).result(100)


def test_options_that_ray_rejects() -> None:
    with shoal.engine("ray", 1, runtime_env={"working_dir": "/nowhere"}) as engine:
        with pytest.raises(EngineError, match=r"rejects the options.*/nowhere"):
            engine.submit(tasks.echo, 1).result(60)


def test_the_head_is_idle_while_workers_work() -> None:
    with shoal.engine("ray", workers=1) as engine:
        engine.map(tasks.echo, range(3))
        before = time.process_time()
        engine.submit(tasks.nap, 1.0).result(60)
        assert time.process_time() - before < 0.3


def test_actors_have_names() -> None:
    import ray

    with shoal.engine("ray", workers=1) as engine:
        engine.map(tasks.echo, [1])
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert [name for name in names if name.startswith("shoal-") and name.endswith("-worker-0")], names


def test_another_cluster_at_the_same_time_is_refused() -> None:
    with pytest.raises(UsageError, match="Close that engine first"):
        shoal.engine("ray://127.0.0.1:9999")


def assert_gone(head: "subprocess.Popen[str]", family: list[psutil.Process]) -> None:
    """Nothing is left of a head: no processes and no session folder."""
    assert not psutil.wait_procs(family, timeout=20)[1]
    deadline = time.monotonic() + 20
    while left := folders_of(head):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def folders_of(head: "subprocess.Popen[str]") -> list[Path]:
    return list(SESSION_ROOT.glob(f"shoal-ray-{head.pid}-*"))


SCRIPT = """
    import os, pathlib, signal, subprocess, sys, time
    import shoal
    sys.path.append(sys.argv[1])
    import travelling

    def work(x):
        return x * x

    def sleepy(x):
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)

    if __name__ == "__main__":
        signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
        engine = shoal.engine("ray", workers=2, runtime_env={"working_dir": sys.argv[1]})
        pathlib.Path(__file__).unlink()  # workers get its source
        print(engine.map(work, range(4)), *engine.map(travelling.where, [0]), flush=True)
        engine.submit(sleepy, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
"""


def test_nothing_of_ray_outlives_a_head_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "travelling.py").write_text("def where(_):\n    return __file__\n")
    command = [sys.executable, str(script), str(shipped)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path) as head:
        assert head.stdout is not None
        results, _, where = head.stdout.readline().rpartition(" ")
        assert results == "[0, 1, 4, 9]"
        assert "runtime_resources" in where, "the node's copy of the module, not the file of the head"
        assert head.stdout.readline() == "handled\n", "Ray leaves signals to the script"
        family = family_of(head)
        while not any(process.name() == "sleep" for process in family):
            family = family_of(head)
        assert folders_of(head)
        head.kill()
    assert_gone(head, family)


def family_of(head: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(head.pid).children(recursive=True)


@pytest.mark.timeout(240)
def test_nodes_come_and_go(tmp_path: Path) -> None:
    script = ROOT / "tests/support/ray_cluster.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["workers"][:2] == [1, 1]
    assert max(found["workers"]) == 3, "a node that joins is used"
    assert found["lost"] == 2, "only the workers of the node are lost with it"
    assert found["answers"] == list(range(1, 11)), "a node that would compute other bits is not used"
    assert found["threads"] == "1", "also in a Ray that Shoal did not start"
    assert (found["spread"], found["pack"]) == (2, 1)
    assert found["elsewhere"] in (None, ["survived", "survived", []])  # a process namespace needs root
    words = ["train", "trpo", *WALK, "--iterations=8", "--engine=serial", "--name=serial", "--no-tensorboard"]
    subprocess.run(
        [sys.executable, "-m", "shoal", *words], cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True
    )
    runs = [RunDir(tmp_path / "runs" / name).metrics() for name in ("elastic", "serial")]
    assert [line["digest"] for line in runs[0]] == [line["digest"] for line in runs[1]]


def test_ctrl_c_saves_and_ends(tmp_path: Path) -> None:
    words = ["train", "trpo", *WALK, "--iterations=100000", "--engine=ray", "--workers=2", "--name=long"]
    command = [sys.executable, "-P", "-m", "shoal", *words]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as head:
        file = tmp_path / "runs/long/metrics.jsonl"
        deadline = time.monotonic() + 60
        while not file.exists() or file.read_text().count("\n") < 3:
            assert head.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        family = family_of(head)
        assert folders_of(head)
        os.killpg(head.pid, signal.SIGINT)  # as a terminal does: Ray's processes get it too
        out, _ = head.communicate(timeout=60)
    assert head.returncode == 130, out
    assert "SIGINT: saved iteration" in out
    assert "lost" not in out
    assert RunDir(tmp_path / "runs/long").saved()
    assert_gone(head, family)
