"""A proxy of an engine, here in the same process as the engine: it passes the contract of all engines."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import shoal
from shoal.engines.base import Engine
from shoal.engines.proxy import EngineProxy, EngineServer
from shoal.errors import EngineClosed
from tests.engines.contract import Contract
from tests.support import tasks

pytestmark = pytest.mark.processes


def connect(engine: Engine, name: str = "me") -> EngineProxy:
    ours, theirs = socket.socketpair()
    threading.Thread(target=EngineServer(engine, ours, name).serve, daemon=True).start()
    return EngineProxy(theirs, engine.workers)


class OwningProxy(EngineProxy):
    """Closes the engine too when it is closed."""

    owner: Engine

    def close(self) -> None:
        super().close()
        self.owner.close()


class TestProxy(Contract):
    def make(self, **options: Any) -> shoal.Engine:
        owner = shoal.engine("processes", workers=2)
        engine = connect(owner)
        engine.__class__ = OwningProxy
        engine.owner = owner  # type: ignore[attr-defined]
        return engine


@pytest.fixture
def owner() -> Iterator[Engine]:
    with shoal.engine("processes", workers=2) as engine:
        yield engine


def test_proxies_share_workers_and_nothing_else(owner: Engine) -> None:
    with connect(owner, "one") as one, connect(owner, "two") as two:
        values = [engine.share(number) for engine, number in ((one, 10), (two, 20))]
        assert one.map(tasks.add, range(3), values[0]) == [10, 11, 12]
        assert two.map(tasks.add, range(3), values[1]) == [20, 21, 22]
        pids = [set(engine.map(tasks.pid, range(20))) for engine in (one, two, owner)]
        assert set.union(*pids) <= set(owner.pids)  # type: ignore[attr-defined]
    assert owner.map(tasks.add, [1], 1) == [2], "the workers stay"


def test_tasks_fail_when_the_owner_closes(owner: Engine) -> None:
    with connect(owner) as engine:
        hanging = engine.submit(tasks.nap, 60.0)
        owner.close()
        with pytest.raises(EngineClosed):
            hanging.result(30)


def test_a_closed_proxy_leaves_no_tasks_behind(owner: Engine) -> None:
    engine = connect(owner)
    for _ in range(50):
        engine.submit(tasks.nap, 0.2)
    engine.close()
    with contextlib.closing(owner):
        assert owner.submit(tasks.add, 1, 1).result(5) == 2, "it does not wait for the tasks of the proxy"


def test_telemetry_covers_all_proxies(owner: Engine) -> None:
    with connect(owner) as one, connect(owner) as two:
        one.map(tasks.add, range(5), 1)
        two.map(tasks.add, range(5), 1)
        assert two.telemetry().tasks == owner.telemetry().tasks == 10


def test_shared_values_are_released(owner: Engine) -> None:
    with connect(owner) as engine:
        for number in range(20):
            assert engine.submit(tasks.add, engine.share(number), 1).result(30) == number + 1
        assert len(owner._shared) < 5, "those that are still referred to"  # type: ignore[attr-defined]
