"""`shoal worker`, `shoal redis` and runs over Redis from the command line; no secret may leak."""

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import shoal as package
from shoal.engines.redis import address
from shoal.engines.redis.local_server import ROLES, LocalServer
from shoal.runs.folder import RunDir
from shoal.testing.redis_rig import RedisRig
from tests.support import tasks
from tests.support.cli import ROOT, SMALL, read_until, shoal, start
from tests.support.docs import commands

pytestmark = pytest.mark.redis

WALK = ["train", "trpo", "tests.support.toys:Walk-v0", *SMALL[:-1], "--no-tensorboard"]


class Home:
    """A user's state folder, with a server that ends with the test."""

    def __init__(self, path: Path) -> None:
        self.variables = {"XDG_STATE_HOME": str(path / "state")}
        self.cwd = path
        self.local = LocalServer(address.state_folder(self.variables))
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *words: str) -> tuple[int, str, str]:
        return shoal(*words, cwd=self.cwd, extra=self.variables)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        self.started.append(start(*words, cwd=self.cwd, extra=self.variables))
        return self.started[-1]

    def close(self) -> None:
        """End processes that a failed test left behind."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if self.local.running():
            self.local.stop()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with contextlib.closing(Home(tmp_path)) as found:
        yield found


def everything_that_others_can_read(*folders: Path) -> bytes:
    """Command lines of all processes, and what is in files that are not private."""
    found = b""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += line.read_bytes()
        except OSError:
            continue
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_mode & 0o077:
                found += path.read_bytes()
    return found


def test_a_run_that_workers_join_and_leave(home: Home) -> None:
    home.local.configure()
    server = home.local.launch(detached=False)
    worker = home.start("worker", "--workers=2", "--allow=tests")
    read_until(worker, "2 worker(s) at redis://127.0.0.1")
    head = home.start(*WALK, "--iterations=4000", "--engine=redis", "--name=mine")
    read_until(worker, "2 of 2 worker(s) working for")
    status, deadline = "", time.monotonic() + 60
    while not re.search(r"1 +2 +training", status):  # the next heartbeat writes it
        assert time.monotonic() < deadline, status
        code, status, _ = home.run("redis", "status")
        assert code == 0
    assert re.search(rf"{package.__version__} +2 +2 +[\d.]+ +[\d.]+ s ago +working", status), status
    secret = home.local.address.password.encode()
    assert secret not in everything_that_others_can_read(home.cwd), "a password leaked"
    assert "keys removed" in home.run("redis", "flush")[1]
    run = RunDir(home.cwd / "runs/mine")
    before, deadline = len(run.metrics()), time.monotonic() + 60
    while len(run.metrics()) < before + 3:  # the run goes on by itself
        assert time.monotonic() < deadline
        assert head.poll() is None
        time.sleep(0.02)
    head.send_signal(signal.SIGINT)
    out, err = head.communicate(timeout=20)
    assert head.returncode == 130, out + err
    assert "saved iteration" in out
    read_until(worker, "waiting for a run")
    worker.terminate()
    rest, err = worker.communicate(timeout=20)
    assert worker.returncode == 143
    assert err == ""
    assert secret not in out.encode() + rest.encode() + everything_that_others_can_read(home.cwd)
    assert secret not in b"".join(path.read_bytes() for path in (home.cwd / "runs").rglob("*") if path.is_file())
    home.local.stop()
    server.wait(10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["worker", "--redis", "redis://me:hunter2@127.0.0.1:1"], "process list.*password_file=FILE"),
        (
            ["train", "trpo", "CartPole-v1", "--engine", "redis://127.0.0.1:1"],
            "no Redis server answers.*shoal redis start",
        ),
        (["redis", "status", "--redis", "redis://127.0.0.1:1"], "no Redis server answers at"),
    ],
)
def test_mistakes(words: list[str], message: str, home: Home) -> None:
    code, out, err = home.run(*words)
    assert code == 2
    assert re.search(message, err + out, re.DOTALL), err + out
    assert "Traceback" not in err
    assert "hunter2" not in err + out


def test_roles_may_do_what_they_need_and_nothing_else(home: Home) -> None:
    code, out, _ = home.run("redis", "start", "--acl")
    assert code == 0
    urls = dict(re.findall(r"  (\w+) +(redis://\S+)", out))
    assert set(urls) == set(ROLES)
    worker = home.start("worker", "--redis", urls["worker"], "--workers=1", "--allow=tests")
    try:
        with package.engine(urls["head"]) as engine:
            values = engine.share([1, 2])
            assert engine.map(tasks.add, [[0]] * 20, values) == [[0, 1, 2]] * 20
        read_until(worker, "waiting for a run")
    finally:
        worker.terminate()
        worker.communicate(timeout=20)
    nowhere = {"XDG_STATE_HOME": str(home.cwd / "nothing")}
    for role in ("head", "worker"):
        link = address.find_server(urls[role], nowhere).open(5.0)
        for command in ("EVAL x 0", "CONFIG GET *", "FLUSHALL", "KEYS *", "SET other 1", "SHUTDOWN"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                link.execute_command(*command.split())
        link.close()
    link = address.find_server(urls["worker"], nowhere).open(5.0)
    with pytest.raises(redis.exceptions.NoPermissionError):
        link.set("shoal:run:mine", b"")
    link.close()
    with pytest.raises(redis.exceptions.RedisError):
        address.Address("redis", "127.0.0.1", home.local.address.port).open(5.0).get("shoal:runs")


def test_messages_are_signed_where_there_is_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("a secret that is long enough")
    key.chmod(0o600)
    with RedisRig(allow=["tests"]) as rig:
        rig.add_machine(1)  # has no key
        rig.wait_for_workers(1)
        with package.engine(f"{rig.address}&key_file={key}") as engine:
            future = engine.submit(tasks.echo, 1)
            rig.wait(lambda machines: any(machine.refusals for machine in machines))
            assert not future.done()
            rig.add_machine(1, SHOAL_KEY_FILE=str(key))
            assert future.result(60) == 1
            assert engine.map(tasks.add, range(20), 1) == list(range(1, 21))
        monkeypatch.setenv("SHOAL_KEY_FILE", str(key))
        code, out, _ = shoal("redis", "status", "--redis", rig.address, cwd=tmp_path)
        assert code == 0
        assert "1 machine(s)" in out, "machines without the key are refused"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_and_unix_sockets(tmp_path: Path) -> None:
    local = LocalServer(tmp_path / "server")
    local.configure()
    files = {"crt": tmp_path / "a.crt", "key": tmp_path / "a.key"}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", files["key"], "-out", files["crt"],
         "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    conf = local.folder / "redis.conf"
    port = local.address.port
    with conf.open("a") as file:
        file.write(f"tls-cert-file {files['crt']}\ntls-key-file {files['key']}\ntls-auth-clients no\n")
    from shoal.engines.redis.local_server import free_port

    tls = free_port()
    path = tmp_path / "redis.sock"
    conf.write_text(conf.read_text() + f"tls-port {tls}\nunixsocket {path}\n")
    server = local.launch(detached=False)
    try:
        assert port != tls
        url = f"rediss://localhost:{tls}?password_file={local.password_file()}"
        worker = start("worker", "--redis", url, "--ca-file", str(files["crt"]), "--workers=1", "--allow=tests",
                       cwd=tmp_path)  # fmt: skip
        try:
            for place in (f"{url}&ca_file={files['crt']}", f"unix://{path}?password_file={local.password_file()}"):
                with package.engine(place, 1) as engine:
                    assert engine.map(tasks.echo, [1, 2]) == [1, 2]
            with pytest.raises(package.errors.UsageError, match="certificate"):
                package.engine(url)
        finally:
            worker.terminate()
            worker.communicate(timeout=20)
    finally:
        server.kill()
        server.wait()


def test_verify_with_every_fault(tmp_path: Path) -> None:
    words = ["--engines=redis:2", "--kill-workers", "--kill-head", "--iterations=2"]
    code, out, err = shoal("verify", "trpo", "tests.support.toys:Walk-v0", *SMALL[:-1], *words, cwd=tmp_path)
    assert code == 0, out + err
    assert "Equal: all 3 ways" in out
    assert "the server restarted and flushed" in out
    assert re.search(r"\d workers lost: redis:2, workers killed", out)


def test_commands_of_the_guide(home: Home) -> None:
    running = []
    found = commands(ROOT / "docs/redis.md")
    assert len(found) == 6
    said = {}
    try:
        for line in found:
            shoal_, *words = shlex.split(line)
            assert shoal_ == "shoal"
            if words[-1] == "&":
                running.append(home.start(*words[:-1]))
                continue
            code, said[words[1]], err = home.run(*words)
            assert code == 0, f"{line}\n{said[words[1]]}\n{err}"
            if words[1] == "start":
                assert home.run(*words)[0] == 2, "only one server per user"
        assert re.search(r"Redis runs at redis://127\.0\.0\.1:\d+ \(pid \d+\)", said["start"])
        assert re.search(r"s ago +waiting", said["status"])
        assert not home.local.connection_file.exists()
    finally:
        for process in running:
            process.terminate()
            process.communicate(timeout=20)
