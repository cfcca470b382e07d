"""A Redis server and workers on this machine, for `shoal verify`, `shoal doctor`, `shoal bench` and tests.

In a test of your own (the functions that workers run are in `my_package`):

    from shoal.testing.redis_rig import RedisRig

    def test_over_redis():
        with RedisRig(allow=["my_package"]) as rig:
            rig.add_machine(workers=2)
            with shoal.engine(rig.address, workers=2) as engine:
                assert engine.map(my_package.square, [1, 2]) == [1, 4]
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shoal.base.host import WORKER_ENVIRONMENT, python_path, shoal_command
from shoal.engines.redis.address import find_server
from shoal.engines.redis.envelope import Refusals
from shoal.engines.redis.link import TIMEOUT
from shoal.engines.redis.local_server import LocalServer, flush
from shoal.engines.redis.records import MachineRecord, Registry
from shoal.engines.redis.supervisor import PARENT
from shoal.errors import EngineError

if TYPE_CHECKING:
    import redis

_WITHIN = 60.0  # seconds that `wait` waits


class RedisRig:
    """A context manager: a server on a free port, and machines that are supervisor processes on this host.

    Workers may run functions of the modules in `allow`. `timeout` is the `--timeout` of the supervisors.
    """

    def __init__(self, allow: Sequence[str] = (), timeout: float = TIMEOUT) -> None:
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-redis-"))
        self.local_server = LocalServer(Path(folder) / "server")
        self.local_server.configure()
        self.supervisors: list[subprocess.Popen[bytes]] = []
        """The processes of `shoal worker`, in the order of `add_machine`."""
        self._allow, self._timeout = allow, timeout
        self._server_process = self.local_server.launch(detached=False)

    @property
    def address(self) -> str:
        """Address of the server, for `shoal.engine` or `--engine`."""
        return f"{self.local_server.address.url}?password_file={self.local_server.password_file()}"

    def add_machine(self, workers: int, address: str | None = None, **variables: str) -> subprocess.Popen[bytes]:
        """Start a supervisor with some workers. It runs until the rig is closed.

        `address` is that of a proxy, if not the server's; `variables` are added to its environment.
        """
        words = ["worker", "--redis", address or self.address, "--workers", str(workers)]
        words += [word for module in self._allow for word in ("--allow", module)]
        words += ["--timeout", str(self._timeout)]
        supervisor = subprocess.Popen(
            shoal_command(*words),
            env=os.environ | WORKER_ENVIRONMENT | {"PYTHONPATH": python_path(), PARENT: str(os.getpid())} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self.supervisors.append(supervisor)
        return supervisor

    @contextlib.contextmanager
    def connection(self) -> Iterator[redis.Redis]:
        """Connect to the server for the length of a block."""
        connection = self.local_server.address.open(5.0)
        try:
            yield connection
        finally:
            connection.close()

    def machines(self) -> list[MachineRecord]:
        """Read the records of all machines."""
        with self.connection() as connection:
            return Registry(connection, find_server(self.address).key, Refusals()).machines()

    def wait(self, holds: Callable[[list[MachineRecord]], bool]) -> list[MachineRecord]:
        """Wait until a condition on the machines' records holds, and return the records."""
        deadline = time.monotonic() + _WITHIN
        while not holds(found := self.machines()):
            if time.monotonic() > deadline:
                raise EngineError(f"the machines did not reach the expected state within {_WITHIN:.0f} s: {found}")
            time.sleep(0.02)
        return found

    def wait_for_workers(self, count: int) -> None:
        """Wait until at least `count` workers are ready."""
        self.wait(lambda machines: sum(len(machine.workers) for machine in machines) >= count)

    def restart_server(self) -> None:
        """Kill the server and start it again, without its data."""
        self._server_process.send_signal(signal.SIGKILL)
        self._server_process.wait()
        self._server_process = self.local_server.launch(detached=False)

    def flush(self) -> None:
        """Delete all of Shoal's keys on the server."""
        with self.connection() as connection:
            flush(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for supervisor in self.supervisors:
            supervisor.send_signal(signal.SIGCONT)
            supervisor.kill()  # its workers end with it
        self._server_process.kill()
        for process in [*self.supervisors, self._server_process]:
            process.wait()
        self._stack.close()
