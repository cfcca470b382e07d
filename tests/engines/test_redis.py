"""The engine contract on a real Redis server with its own machines, and what happens when each of them fails."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

import shoal
from shoal.algos import trpo
from shoal.commands.verify import flags
from shoal.engines import wire
from shoal.engines.redis.envelope import Header, Refusals, seal
from shoal.engines.redis.records import RUNS, HeadRecord, MachineRecord, Registry, head_inbox, machine_inbox, run_key
from shoal.engines.wire import Kind
from shoal.runs import run
from shoal.runs.folder import RunDir
from shoal.runs.spec import RunSpec
from shoal.testing.redis_rig import RedisRig
from tests.engines.contract import WorkersContract
from tests.support import tasks
from tests.support.cli import shoal as cli
from tests.support.cli import start
from tests.support.tcp_proxy import Proxy

pytestmark = pytest.mark.redis


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def digests(cwd: Path, name: str) -> list[str]:
    return [line["digest"] for line in RunDir(cwd / "runs" / name).metrics()]


@pytest.fixture(scope="module")
def rig() -> Iterator[RedisRig]:
    """Two machines with three workers."""
    with RedisRig(allow=["tests"]) as own:
        own.add_machine(2)
        own.add_machine(1)
        own.wait_for_workers(3)
        yield own
        children = [child for machine in own.supervisors for child in psutil.Process(machine.pid).children()]
        assert children
    assert not psutil.wait_procs(children, timeout=15)[1]


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Replaces the fixture of all tests: here machines outlive a test, and replace their workers."""
    before = psutil.Process().children()
    yield
    assert len(psutil.Process().children()) <= len(before)


class TestRedis(WorkersContract):
    @pytest.fixture(autouse=True)
    def _on(self, rig: RedisRig) -> None:
        self.rig = rig

    def make(self, **options: Any) -> shoal.Engine:
        return shoal.engine(self.rig.address, **options)


# What may be lost on the way -----------------------------------------------------------------------------------


def started(marker: Path) -> None:
    """Wait until a task of `tasks.until` is running."""
    until(marker.exists)


def test_server_that_is_killed_and_comes_back(rig: RedisRig, tmp_path: Path) -> None:
    with shoal.engine(rig.address, 3) as engine:
        values = engine.share(np.ones(10))
        assert engine.map(tasks.total, range(3), values) == [10.0, 11.0, 12.0]
        futures = [engine.submit(tasks.until, str(tmp_path / f"on{i}"), str(tmp_path / "go")) for i in range(2)]
        for i in range(2):
            started(tmp_path / f"on{i}")
        rig.restart_server()
        (tmp_path / "go").touch()
        assert [future.result(60) for future in futures] == ["went", "went"]
        assert engine.map(tasks.total, range(3), values) == [10.0, 11.0, 12.0], "shared values are sent again"
        assert engine.telemetry().lost_workers == 0, "no worker is to blame"


def test_server_that_forgets_everything(rig: RedisRig, tmp_path: Path) -> None:
    with shoal.engine(rig.address, 3) as engine:
        values = engine.share(np.ones(10))
        assert engine.map(tasks.total, range(3), values) == [10.0, 11.0, 12.0]
        for turn in range(4):  # more often than a task may lose workers by its own fault
            future = engine.submit(tasks.until, str(tmp_path / f"on{turn}"), str(tmp_path / f"go{turn}"))
            started(tmp_path / f"on{turn}")
            with rig.connection() as link:
                link.flushall()
            (tmp_path / f"go{turn}").touch()
            assert future.result(60) == "went"
        assert engine.map(tasks.total, range(3), values) == [10.0, 11.0, 12.0]


def test_what_the_server_forgets_on_the_way_is_sent_again(rig: RedisRig) -> None:
    with shoal.engine(rig.address, 3) as engine:
        for machine in rig.supervisors:
            machine.send_signal(signal.SIGSTOP)
        with rig.connection() as link:
            lists = [machine_inbox(machine.id) for machine in rig.machines()]
            for name in lists:
                link.rpush(name, *[b"in the way"] * 1000)  # a machine that was waiting is given some of these at once
            before = sum(map(link.llen, lists))
            futures = [engine.submit(tasks.echo, number) for number in range(6)]
            until(lambda: sum(map(link.llen, lists)) >= before + 3)
            link.flushall()
        for machine in rig.supervisors:
            machine.send_signal(signal.SIGCONT)
        assert [future.result(60) for future in futures] == list(range(6))


def test_machine_that_is_killed_or_frozen(tmp_path: Path) -> None:
    with RedisRig(allow=["tests"]) as rig:
        rig.add_machine(1)
        with shoal.engine(rig.address, 1, lease=2.0) as engine:
            for number, signal_ in enumerate((signal.SIGKILL, signal.SIGSTOP)):
                future = engine.submit(tasks.until, str(tmp_path / f"on{number}"), str(tmp_path / f"go{number}"))
                started(tmp_path / f"on{number}")
                rig.supervisors[number].send_signal(signal_)
                rig.add_machine(1)
                (tmp_path / f"go{number}").touch()
                assert future.result(60) == "went"
            rig.supervisors[1].send_signal(signal.SIGCONT)
            alive = [machine.pid for machine in rig.supervisors[1:]]
            rig.wait(lambda machines: sum(bool(s.run) for m in machines if m.pid in alive for s in m.workers) == 2)
            assert engine.map(tasks.add, range(20), 1) == list(range(1, 21)), (
                "the machine is back, and its old answers are void"
            )


@pytest.mark.parametrize("who", ["head", "machine"])
def test_black_hole(who: str, tmp_path: Path) -> None:
    with RedisRig(allow=["tests"], timeout=1.0) as rig:
        proxy = Proxy(rig.local_server.address.port)
        through = rig.address.replace(f":{rig.local_server.address.port}", f":{proxy.port}")
        try:
            rig.add_machine(1, address=through if who == "machine" else None)
            address = through if who == "head" else rig.address
            with shoal.engine(address, 1, lease=3.0, timeout=1.0) as engine:
                future = engine.submit(tasks.until, str(tmp_path / "on"), str(tmp_path / "go"))
                started(tmp_path / "on")
                proxy.hole.set()
                (tmp_path / "on").unlink()
                if who == "machine":
                    rig.add_machine(1)
                    started(tmp_path / "on")  # elsewhere
                    (tmp_path / "go").touch()
                    assert future.result(60) == "went"
                else:
                    rig.wait(lambda machines: not any(worker.run for m in machines for worker in m.workers))
                proxy.hole.clear()
                (tmp_path / "go").touch()
                assert future.result(60) == "went"
                workers = 2 if who == "machine" else 1
                rig.wait(lambda machines: sum(bool(s.run) for m in machines for s in m.workers) == workers)
                assert engine.map(tasks.add, range(20), 1) == list(range(1, 21))
        finally:
            proxy.close()


def test_waits_for_workers_and_logs_the_command_to_start_them(caplog: pytest.LogCaptureFixture) -> None:
    with RedisRig(allow=["tests"]) as rig, caplog.at_level("INFO", "shoal"):
        made: Queue[shoal.Engine] = Queue()
        head = threading.Thread(target=lambda: made.put(shoal.engine(rig.address, 2)))
        head.start()
        rig.add_machine(1)
        until(lambda: "waiting for workers (1 of 2 connected)" in caplog.text)
        assert f"shoal worker --redis '{rig.address}'" in caplog.text
        assert made.empty()
        rig.add_machine(1)
        head.join(60)
        with made.get(timeout=1) as engine:
            assert engine.workers == 2
            until(lambda: "2 worker(s) on 2 machine(s)" in caplog.text)


def test_worker_with_other_arithmetic_is_refused_and_the_others_work(caplog: pytest.LogCaptureFixture) -> None:
    with RedisRig(allow=["tests"]) as rig, caplog.at_level("INFO", "shoal"):
        rig.add_machine(1, OPENBLAS_CORETYPE="Nehalem")
        with shoal.engine(rig.address) as engine:
            future = engine.submit(tasks.echo, 1)
            (machine,) = rig.wait(lambda machines: any(machine.refused_by for machine in machines))
            assert "canary" in str(machine.refused_by)
            assert not future.done()
            until(lambda: "would not compute the same bits" in caplog.text)
            assert caplog.text.count("would not compute") == 1
            code, out, _ = cli("redis", "status", "--redis", rig.address, cwd=rig.local_server.folder)
            assert code == 0
            assert "canary: head" in out
            rig.add_machine(1)
            assert future.result(60) == 1


def test_two_heads_share_four_workers(tmp_path: Path) -> None:
    small = trpo.Config(batch_steps=256, lanes=2, width=4, hidden=(8,), value_epochs=1)
    alone = run.Settings("tests.support.toys:Walk-v0", iterations=8, runs=str(tmp_path / "runs"), tensorboard=False)
    with RedisRig(allow=["tests"]) as rig:
        rig.add_machine(2)
        rig.add_machine(2)
        heads = []
        for seed in (1, 2):
            shared = replace(alone, seed=seed, engine=rig.address, name=f"shared{seed}")
            heads.append(start("train", "trpo", shared.env, *flags(shared), *flags(small), cwd=tmp_path))
        rig.wait(lambda machines: len({worker.run for m in machines for worker in m.workers if worker.run}) == 2)
        for seed in (1, 2):
            own = replace(alone, seed=seed, engine="serial", name=f"alone{seed}")
            run.train(RunSpec("trpo", own, small), console=Console(quiet=True))
        for head in heads:
            out, err = head.communicate(timeout=100)
            assert head.returncode == 0, out + err
    for seed in (1, 2):
        assert digests(tmp_path, f"shared{seed}") == digests(tmp_path, f"alone{seed}")


# Hostile messages ----------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


class Forger:
    """Makes messages for a worker of a run that no head would send."""

    def __init__(self, served: HeadRecord, machine: MachineRecord) -> None:
        self.name = machine_inbox(machine.id)
        self._parts = {
            "run": served.id,
            "epoch": served.epoch,
            "machine": machine.id,
            "worker": machine.workers[0].number,
        }
        self._serials = iter(range(10**9, 2 * 10**9))

    def message(self, kind: int, frame: bytes | bytearray = b"", **wrong: Any) -> bytes:
        header = Header(**self._parts | wrong, serial=next(self._serials), kind=kind, number=10**9)
        return seal(b"", self.name, header, frame)

    def task(self, value: Any, **wrong: Any) -> bytes:
        return self.message(Kind.TASK, wire.encode(value), **wrong)

    def orders(self, evil: str) -> list[bytes]:
        """Tasks that this worker may not run for any head."""
        touch = f"touch {evil}"
        named = [
            ("os:system", [touch]),
            ("shoal.commands.mpirun:_run", [["touch", evil]]),
            ("shoal.cli:main", [["runs"]]),
        ]
        return [self.task(value) for value in (*named, None, ["os:system"], {"a": 1}, (1, 2, 3), (1, []))]

    def strangers(self, evil: str) -> list[bytes]:
        """Tasks that it may run, but for another run, or of an epoch that is over."""
        allowed = ("tests.support.tasks:until", [evil, evil])
        return [self.task(allowed, **wrong) for wrong in ({"run": "other"}, {"epoch": 0}, {"machine": "other"})]

    def rubbish(self, evil: str) -> list[bytes]:
        """Everything else."""
        random, name = np.random.default_rng(0), self.name
        found = [random.bytes(size) for size in (0, 1, 39, 40, 41, 100, 10_000)]
        found += [pickle.dumps(Evil()), seal(b"", name, {"run": 1}), seal(b"", name, ["x"] * 7), seal(b"", name, None)]
        found += [b"shr1" + bytes(32) + b"\xff\xff\xff\x7f" + random.bytes(100)]  # a header of 2 GB
        found += [self.message(Kind.WELCOME, wire.encode({"allow": None, "path": [evil], "main": evil}))]
        frames = (b"", random.bytes(30), pickle.dumps(Evil()))
        return found + [self.message(kind, frame) for kind in range(40) for frame in frames]


def test_hostile_messages_are_refused_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = str(tmp_path / "pwned")
    with RedisRig(allow=["tests"]) as rig, caplog.at_level("INFO", "shoal"):
        rig.add_machine(1)
        with shoal.engine(rig.address, 1) as engine, rig.connection() as link:
            assert engine.map(tasks.echo, [1, 2]) == [1, 2]
            (machine,) = rig.wait(lambda machines: any(worker.run for m in machines for worker in m.workers))
            (found,) = Registry(link, b"", Refusals()).heads()
            forger = Forger(found, machine)
            orders, strangers, rubbish = forger.orders(evil), forger.strangers(evil), forger.rubbish(evil)
            link.rpush(forger.name, *strangers, *orders)
            rig.wait(lambda machines: machines[0].refusals == len(orders) + 1)  # one of the strangers is misdirected
            assert engine.map(tasks.add, range(20), 1) == list(range(1, 21))
            link.rpush(forger.name, *rubbish, *orders)
            link.rpush(head_inbox(found.id, found.epoch), *strangers, *orders, *rubbish)
            link.set(run_key("evil"), pickle.dumps(Evil()))
            link.sadd(RUNS, "evil", b"\xff\xfe")
            rig.wait(lambda machines: machines[0].refusals > len(orders) + 20)
            assert engine.map(tasks.add, range(50), 1) == list(range(1, 51)), "the run goes on"
            assert 1 <= caplog.text.count("refused a message") <= 12, "each kind is logged once"
    assert not list(tmp_path.iterdir())
