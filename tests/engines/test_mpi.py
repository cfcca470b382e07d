"""MPI for real: the contract on ranks, runs under mpirun, a rank that dies, a job that is asked to stop."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.commands.verify import _last_rank
from shoal.runs.folder import RunDir
from shoal.spmd.launching import mpirun
from tests.support.cli import SMALL, shoal, start, wait_for

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).parents[2]


def job(*words: str, cwd: Path, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*mpirun(ranks), *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_contract(tmp_path: Path) -> None:
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engines/mpi_contract.py"]
    done = job(*tests, ":", "-n", "2", sys.executable, "-m", "shoal.engines.mpi", cwd=ROOT, ranks=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


def digests(cwd: Path, name: str) -> list[str]:
    return [line["digest"] for line in RunDir(cwd / "runs" / name).metrics()]


WALK = ["train", "trpo", "tests.support.toys:Walk-v0", *SMALL, "--checkpoint-every=1"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the run without MPI."""
    folder = tmp_path_factory.mktemp("plain")
    assert shoal(*WALK, "--iterations=8", "--name=plain", cwd=folder)[0] == 0
    return digests(folder, "plain")


def test_a_rank_that_dies_costs_time_only(tmp_path: Path, plain: list[str]) -> None:
    head = start(*WALK, "--iterations=8", "--engine=mpi", "--name=mpi", cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "mpi")
    wait_for(head, run, 2)
    os.kill(_last_rank(run), signal.SIGKILL)
    out, err = head.communicate(timeout=100)
    assert head.returncode == 0, out + err
    assert "restarting from iteration" in out + err
    assert digests(tmp_path, "mpi") == plain


def test_no_more_starts_than_allowed(tmp_path: Path) -> None:
    head = start(*WALK, "--steps=100000000", "--engine=mpi", "--name=mpi", "--restarts=0", cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "mpi")
    wait_for(head, run, 2)
    os.kill(_last_rank(run), signal.SIGKILL)
    out, err = head.communicate(timeout=100)
    assert head.returncode == 137, out + err
    assert "shoal resume" in out + err


WITHOUT_MPI = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "mpi4py" else find(name, *more)
sys.argv = sys.argv[3:]
runpy.run_module("shoal", run_name="__main__", alter_sys=True)
"""


def test_a_run_that_cannot_begin_leaves_its_name_free(tmp_path: Path) -> None:
    words = [*WALK, "--engine=mpi", "--name=mpi"]
    for found, message in (
        (shoal(*words, "--env-kwargs", '{"nonsense": 1}', cwd=tmp_path), "does not take --env-kwargs"),
        (shoal(*words, cwd=tmp_path, through=WITHOUT_MPI), "mpi4py was not found. Install it"),
    ):
        code, _, err = found
        assert code == 2
        assert message in err
        assert not (tmp_path / "runs/mpi").exists()


def test_a_stopped_job_saves_and_continues_on_another_engine(tmp_path: Path, plain: list[str]) -> None:
    head = start(*WALK, "--steps=100000000", "--engine=mpi", "--name=mpi", cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "mpi")
    wait_for(head, run, 2)
    head.send_signal(signal.SIGTERM)
    out, err = head.communicate(timeout=100)
    assert head.returncode == 143, out + err
    assert "saved iteration" in out
    assert not run.busy()
    done = max(run.saved())
    assert digests(tmp_path, "mpi")[:8] == plain[:done]
    more = ["--iterations", str(done + 2), "--engine", "processes", "--workers", "1"]
    assert shoal("resume", "mpi", *more, cwd=tmp_path)[0] == 0
    assert digests(tmp_path, "mpi")[:8] == plain[: done + 2]


def test_ranks_started_by_another_launcher(tmp_path: Path, plain: list[str]) -> None:
    shoal_ = [sys.executable, "-P", "-m", "shoal"]
    words = [word for word in WALK if not word.startswith("--workers")]
    done = job(*shoal_, *words, "--iterations=8", "--engine=mpi", "--name=own", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(tmp_path, "own") == plain
    again = job(*shoal_, "resume", "own", "--engine=mpi", cwd=tmp_path)
    assert again.returncode == 0, "the other ranks are released although there was nothing to do"
    assert "has reached its goal already" in again.stdout
    refused = job(*shoal_, *words, "--engine=processes", cwd=tmp_path)
    assert refused.returncode == 2
    assert "Use --engine mpi" in refused.stderr


def test_ranks_on_two_hosts(tmp_path: Path, plain: list[str], two_hosts: list[str]) -> None:
    words = [word for word in WALK if not word.startswith("--workers")]
    command = [*two_hosts, sys.executable, "-P", "-m", "shoal", *words, "--iterations=8", "--engine=mpi", "--name=two"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(tmp_path, "two") == plain
