"""A server and workers of one's own, to try things on: faults for `shoal verify`, timings for `shoal bench`, tests."""

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
from shoal.engines.redis.local_server import LocalServer, flush
from shoal.engines.redis.records import MachineRecord, Registry
from shoal.engines.redis.supervisor import PARENT
from shoal.errors import EngineError

if TYPE_CHECKING:
    import redis

_WITHIN = 60.0  # seconds for anything to happen


class Rig:
    """A context: a server on a free port, and machines that are processes here."""

    def __init__(self, allow: Sequence[str] = (), timeout: float = 5.0) -> None:
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-redis-"))
        self.local = LocalServer(Path(folder) / "server")
        self.local.configure()
        self.machines: list[subprocess.Popen[bytes]] = []
        self._allow, self._timeout = allow, timeout
        self.server = self.local.launch(detached=False)

    @property
    def address(self) -> str:
        """What to type after `--engine`."""
        return f"{self.local.address.url}?password_file={self.local.password_file()}"

    def add_machine(self, workers: int, address: str | None = None, **variables: str) -> subprocess.Popen[bytes]:
        """Start a machine with some workers; it lives until the rig is closed."""
        words = ["worker", "--redis", address or self.address, "--workers", str(workers)]
        words += [word for module in self._allow for word in ("--allow", module)]
        words += ["--timeout", str(self._timeout)]
        machine = subprocess.Popen(
            shoal_command(*words),
            env=os.environ | WORKER_ENVIRONMENT | {"PYTHONPATH": python_path(), PARENT: str(os.getpid())} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self.machines.append(machine)
        return machine

    def fleet(self) -> list[MachineRecord]:
        """The machines' records."""
        with self.link() as link:
            return Registry(link, find_server(self.address).key, Refusals()).machines()

    @contextlib.contextmanager
    def link(self) -> Iterator[redis.Redis]:
        """A connection."""
        link = self.local.address.open(5.0)
        try:
            yield link
        finally:
            link.close()

    def wait(self, holds: Callable[[list[MachineRecord]], bool]) -> list[MachineRecord]:
        """Wait until something can be said of the machines."""
        deadline = time.monotonic() + _WITHIN
        while not holds(found := self.fleet()):
            if time.monotonic() > deadline:
                raise EngineError(f"the machines did not get that far in {_WITHIN:.0f} s: {found}")
            time.sleep(0.02)
        return found

    def wait_for_workers(self, count: int) -> None:
        """Wait until so many workers are ready."""
        self.wait(lambda machines: sum(len(machine.workers) for machine in machines) >= count)

    def restart_server(self) -> None:
        """Kill the server and start it again; it forgets everything."""
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        self.server = self.local.launch(detached=False)

    def flush(self) -> None:
        """Have the server forget everything."""
        with self.link() as link:
            flush(link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.send_signal(signal.SIGCONT)
            machine.kill()  # its workers end with it
        self.server.kill()
        for process in [*self.machines, self.server]:
            process.wait()
        self._stack.close()
