"""Redis for real: the contract on a server and machines of its own, and what happens when each of them fails."""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import shoal
from shoal.engines.redis.rig import Rig
from tests.engines.contract import WorkersContract


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Two machines with three workers."""
    with Rig(allow=["tests"]) as own:
        own.add_machine(2)
        own.add_machine(1)
        own.wait_for_workers(3)
        yield own
        children = [child for machine in own.machines for child in psutil.Process(machine.pid).children()]
        assert children
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Instead of the one for all tests: here machines outlive a test, with ever new workers."""
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


class TestRedis(WorkersContract):
    @pytest.fixture(autouse=True)
    def _on(self, rig: Rig) -> None:
        self.rig = rig

    def make(self, **options: Any) -> shoal.Engine:
        return shoal.engine(self.rig.address, **options)
