"""`shoal up` with real launchers, a real Ray and real signals."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.base import lifetime
from shoal.commands.up import link
from shoal.commands.up.allocation import Allocation, parse_duration, time_left
from shoal.commands.up.roster import Roster
from shoal.errors import UsageError
from shoal.runs.folder import RunDir
from shoal.spmd.launching import mpirun, without_rank
from tests.support.cli import read_until

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
SHOAL = [sys.executable, "-P", "-m", "shoal"]
WALK = [
    "tests.support.toys:Walk-v0",
    "--batch-steps=256",
    "--lanes=2",
    "--width=4",
    "--hidden",
    "8",
    "--value-epochs=1",
]
TEMPORARY = Path(tempfile.gettempdir())
OURS = {"SHOAL_TESTED_BY": str(os.getpid())}  # other users may run Ray on this machine at the same time


def environment(**more: str) -> dict[str, str]:
    return without_rank(os.environ) | {"PYTHONPATH": str(ROOT)} | OURS | more


def ranks(job: str, rank: int, size: int) -> dict[str, str]:
    """Variables that Open MPI sets."""
    return environment(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(size), PMIX_NAMESPACE=job)


def start(cwd: Path, *words: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*SHOAL, "up", *words], cwd=cwd, env=env or environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def up(cwd: Path, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    process = start(cwd, *words, env=env)
    out, _ = process.communicate(timeout=100)
    return process.returncode, out


def left_behind(before: set[int]) -> list[str]:
    """Processes of Ray or of a driver that a test has started. Ray's workers hide their variables: look for orphans."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid in before or process.status() == psutil.STATUS_ZOMBIE:
                continue
            words, variables = " ".join(process.cmdline()), process.environ()
            kept = lifetime.MARK in variables or "raylet" in words or "gcs_server" in words
            if (kept and OURS.items() <= variables.items()) or ("ray::" in words and process.ppid() == 1):
                found.append(words)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    folders, processes = set(TEMPORARY.glob("shoal-up-*")), set(psutil.pids())
    yield
    deadline = time.monotonic() + 20
    while (left := left_behind(processes)) or set(TEMPORARY.glob("shoal-up-*")) - folders:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


# Variables of launchers and schedulers ------------------------------------------------------------------------


def test_allocation_from_variables() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    slurm |= {"SLURM_CPUS_ON_NODE": "12", "SLURM_JOB_END_TIME": str(int(time.time()) + 1000)}
    one = Allocation.read(slurm)
    assert (one.launcher, one.rank, one.size, one.job, one.limit) == ("srun", 3, 8, "77-0", 12)
    assert 990 < (time_left(slurm) or 0) <= 1000
    again = Allocation.read(slurm | {"SLURM_RESTART_COUNT": "1"})
    assert again.job == "77-0-1", "a requeued job does not meet its earlier start"
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-host/x-12@1"}
    assert Allocation.read(mpi).job == "prterun-host-x-12-1"
    assert Allocation.read({}).size == 1
    aprun = {"ALPS_APP_PE": "2", "ALPS_APP_ID": "5"}
    with pytest.raises(UsageError, match="--ranks N"):
        Allocation.read(aprun)
    assert Allocation.read(aprun, ranks=4).size == 4
    with pytest.raises(UsageError, match="--job"):
        Allocation.read({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_allocation_of_pbs(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    here = socket.gethostname().split(".")[0]
    nodes.write_text(f"other.site\nother.site\n{here}.site\n{here}.site\n")
    variables = {"PBS_NODEFILE": str(nodes), "PBS_TASKNUM": "2", "PBS_JOBID": "9.server", "PBS_WALLTIME": "3600"}
    one = Allocation.read(variables)
    assert (one.launcher, one.rank, one.size, one.job) == ("pbsdsh", 1, 2, "9.server")
    assert time_left(variables) == 3600.0
    nodes.write_text("other\n")
    with pytest.raises(UsageError, match="is not in the node file"):
        Allocation.read(variables)


def test_durations() -> None:
    for text, seconds in {
        "01:30:00": 5400,
        "1-00:00:01": 86401,
        "0:1:58": 118,
        "90m": 5400,
        "2h": 7200,
        "1.5s": 1.5,
    }.items():
        assert parse_duration(text) == seconds
    for text in ("", "5", "1:2:3", "10:00", "h"):
        with pytest.raises(UsageError, match="12:00:00"):
            parse_duration(text)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_batch_scripts_hand_the_command_over_as_it_is(tmp_path: Path, scheduler: str) -> None:
    words = ["python", "my script.py", "it's", '"$HOME"', "`x`", "--address", "{address}"]
    code, script = up(tmp_path, "--print-script", scheduler, "--walltime=90m", "--nodes=3", "--", *words)
    assert code == 0
    assert "01:30:00" in script
    # Run it, with programs of those names that do what srun and pbsdsh do on one machine.
    (tmp_path / "script").write_text(script)
    (tmp_path / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (tmp_path / "pbsdsh").write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    (tmp_path / "up").write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:], sep='|')\nsys.exit(75)\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho $*\n")
    for name in ("srun", "pbsdsh", "up", "scontrol"):
        (tmp_path / name).chmod(0o755)
    text = script.replace(f"{Path(sys.executable).parent}/shoal", f"{tmp_path}/up")
    text = text.replace(f"{sys.executable} -m shoal", f"{tmp_path}/up")
    variables = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", PBS_O_WORKDIR=str(tmp_path), SLURM_JOB_ID="5")
    done = subprocess.run(["bash", "-c", text], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert done.stdout.splitlines()[0].endswith("|".join(["--", *words]))
    assert "requeue 5" in done.stdout or "submit this script again" in done.stdout


# Mistakes, before Ray is started ------------------------------------------------------------------------------


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    code, out = up(tmp_path, "--deadline=0", "--walltime=soon", "--port=70000")
    assert code == 2
    for words in ("deadline must be above 0", "'soon' is not a time", "70000", "no command to run"):
        assert words in out


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    first = start(tmp_path, "--deadline=6", "--", "true", env=ranks("never", 0, 3))
    second = start(tmp_path, "--deadline=6", "--", "true", env=ranks("never", 1, 3))
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "ranks: 1 of 2 ready after 6 s; missing: rank 2" in out
    assert second.wait(30) == 0, "a rank that has connected is told to end"
    assert second.stdout is not None
    second.stdout.close()


def test_a_rank_that_does_not_find_the_first(tmp_path: Path) -> None:
    code, out = up(tmp_path, "--deadline=0.5", "--", "true", env=ranks("lost", 1, 2))
    assert code == 1
    assert "did not find rank 0" in out
    assert "--folder PATH" in out


def test_only_ranks_that_know_the_secret_are_admitted(tmp_path: Path) -> None:
    roster = Roster(tmp_path, 2)
    leader = json.loads((tmp_path / link.FILE).read_text())
    hello = {"rank": 1, "machine": "there/1", "cores": [0], "limit": None}
    with contextlib.closing(roster), socket.create_connection(("127.0.0.1", leader["port"])) as stranger:
        stranger.sendall((json.dumps(hello | {"token": "guessed"}) + "\n").encode() * 2)
        for _ in range(2):
            assert roster.poll(5.0) == []
        assert stranger.recv(1) == b"", "the connection is closed"
        with socket.create_connection(("127.0.0.1", leader["port"])) as rank:
            rank.sendall((json.dumps(hello | {"token": leader["token"]}) + "\n").encode())
            while roster.missing:
                roster.poll(5.0)
            assert json.loads(rank.recv(100)) == {"do": "welcome"}
        assert [member.state for member in roster.poll(5.0)] == ["gone"]


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out = up(tmp_path, f"--port={port}", "--", "true")
    assert code == 2
    assert f"port {port} on 127.0.0.1 cannot be used: Address already in use" in out
    assert "Without --port" in out


# With Ray -----------------------------------------------------------------------------------------------------

# Any Ray program: it does not use Shoal.
PI = """
    import random
    import ray

    @ray.remote
    def inside(number):
        rng = random.Random(number)
        return sum(rng.random() ** 2 + rng.random() ** 2 < 1 for _ in range(10_000))

    ray.init()
    total = sum(ray.get([inside.remote(i) for i in range(20)]))
    print(f"pi is about {4 * total / 200_000:.2f}; {len(ray.nodes())} node(s)")
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the run on the serial engine."""
    folder = tmp_path_factory.mktemp("plain")
    words = ["train", "trpo", *WALK, "--iterations=6", "--engine=serial", "--name=plain"]
    subprocess.run([*SHOAL, *words], cwd=folder, env=environment(), check=True, capture_output=True)
    return digests(folder, "plain")


def digests(folder: Path, name: str) -> list[str]:
    return [line["digest"] for line in RunDir(folder / "runs" / name).metrics()]


def drivers(folder: Path) -> list[str]:
    """A driver that runs Shoal on the cluster, then another program, and then fails with exit code 7."""
    (folder / "pi.py").write_text(textwrap.dedent(PI))
    train = " ".join([*SHOAL, "train", "trpo", *WALK, "--iterations=6", "--engine=ray", "--name=up"])
    return ["sh", "-c", f"{train} && {sys.executable} pi.py && echo at {{address}} is $RAY_ADDRESS && exit 7"]


def test_under_mpirun(tmp_path: Path, plain: list[str]) -> None:
    command = [*mpirun(4), *SHOAL, "up", "--", *drivers(tmp_path)]
    with stale_ray() as old:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(RAY_ADDRESS=old), capture_output=True, text=True, timeout=110,
            check=False,
        )  # fmt: skip
    assert done.returncode == 7, done.stdout + done.stderr
    assert digests(tmp_path, "up") == plain
    assert "pi is about 3.1" in done.stdout
    address = done.stdout.split(" is up at ")[1].split()[0]
    assert address != old
    assert f"at {address} is {address}" in done.stdout
    for stage in ("4 rank(s) on 1 machine(s)", "driver (pid", "ended with exit code 7", "all nodes are stopped"):
        assert stage in done.stdout
    assert list(tmp_path.glob("shoal-up/*/logs/*/raylet.out")), "logs of the node are kept"


@contextlib.contextmanager
def stale_ray() -> Iterator[str]:
    """A Ray that another user has left running on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["start", "--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=1", "--block"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words], env=environment(RAY_AUTH_MODE="token"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield f"127.0.0.1:{port}"
    assert process.poll() is None, "a Ray of another user is left alone"
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.wait(30)
    psutil.wait_procs(children, timeout=15)


SLEEPER = """
    import signal, sys, time
    def end(number, frame):
        time.sleep(1)
        print("saved", flush=True)
        sys.exit(128 + number)
    signal.signal(signal.SIGTERM, end)
    print("driving", flush=True)
    time.sleep(600)
"""


def test_killed_first_rank_takes_everything_along(tmp_path: Path) -> None:
    stale = tmp_path / "shoal-up" / "killed"
    stale.mkdir(parents=True)
    (stale / link.FILE).write_text('{"addresses": ["127.0.0.1"], "port": 9, "token": "old"}')
    (tmp_path / "driver.py").write_text(textwrap.dedent(SLEEPER))
    second = start(tmp_path, "--", "true", env=ranks("killed", 1, 2))
    first = start(tmp_path, "--", sys.executable, "driver.py", env=ranks("killed", 0, 2))
    read_until(first, "driving")
    first.kill()
    out, _ = second.communicate(timeout=30)
    assert second.returncode == 1, out
    assert "rank 0 is gone" in out
    read_until(first, "saved")
    first.communicate(timeout=30)  # once no process holds its output any more


def test_driver_is_asked_to_save(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(textwrap.dedent(SLEEPER))
    driver = ["--", "sh", "-c", f"{sys.executable} driver.py; exit $?"]  # a shell, which a signal ends at once
    stopped = start(tmp_path, *driver)
    late = start(tmp_path, "--walltime=121s", "--margin=120", *driver)  # at the same time: they do not meet
    text = read_until(stopped, "driving")
    stopped.send_signal(signal.SIGTERM)
    out, _ = stopped.communicate(timeout=60)
    assert (stopped.returncode, "saved" in text + out) == (143, True)
    out, _ = late.communicate(timeout=60)
    assert late.returncode == 75, out
    assert "start the job again" in out


def test_address_that_ray_writes_late_is_waited_for(tmp_path: Path) -> None:
    slow = """
        import sys
        if "ray.scripts.scripts" in sys.orig_argv:
            import time, ray._private.utils as ours
            write = ours.write_ray_address
            ours.write_ray_address = lambda *words: (time.sleep(2), write(*words))
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(slow))
    code, out = up(tmp_path, "--", "sh", "-c", "echo at $RAY_ADDRESS", env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert code == 0, out
    assert re.search(r"^at 127\.0\.0\.1:\d+$", out, re.MULTILINE), out


def test_two_hosts_one_command(tmp_path: Path, plain: list[str], two_hosts: list[str]) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    command = [*two_hosts, *SHOAL, "up", "--", *drivers(folder)]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "4 rank(s) on 2 machine(s)" in done.stdout
    assert "all 2 nodes have joined" in done.stdout
    assert digests(folder, "up") == plain
    assert "; 2 node(s)" in done.stdout
    assert len(list(folder.glob("shoal-up/*/logs/*/ray-start.log"))) == 2, "one per machine"
