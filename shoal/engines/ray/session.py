"""This process's connection to Ray. It belongs to the process, not to an engine: engines that are open at the same
time use the same one."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from shoal.base.host import WORKER_ENVIRONMENT, python_path
from shoal.base.lifetime import Reaper
from shoal.errors import EngineError, MissingExtra, UsageError

log = logging.getLogger("shoal.engine")

INSTALL = "pip install 'shoal[ray]'"
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers yield to everything else unless told: on a busy machine they hardly run.
    "RAY_worker_niceness": "0",
}
"""Variables for the start of Ray on a machine."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""What Ray does on a Mac unless told: stay on loopback, with no port open to the network."""
FOLDERS = Path("/tmp")  # noqa: S108  mkdtemp makes folders that are ours alone
"""Where Ray's sessions are; names of sockets in it must be short."""
_CONNECT = 5.0  # seconds for a cluster to answer


class Session:
    """This process's connection to Ray, for all engines that are open. Its thread starts Ray and stops it:
    the kernel ends Ray's processes with the thread that started them."""

    _open: Session | None = None
    _lock = threading.Lock()

    def __init__(self, address: str | None, cpus: float, runtime_env: dict[str, Any]) -> None:
        if _is_local(address) and "ray" not in sys.modules:  # read when it is loaded
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        with _variables(LOOPBACK if _is_local(address) else {}):
            import ray

        self.ray: Any = ray
        self.address = address
        self.runtime_env = runtime_env
        """What all workers of this session have, on every node."""
        self.users = 0
        self.started = False
        """Whether Ray runs for this process alone."""
        self._left = threading.Event()
        if ray.is_initialized():  # the user's own: used as it is, and left as it is
            self._thread, self.runtime_env = None, {}
            return
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(address, cpus, ready), name="shoal-ray", daemon=True)
        self._thread.start()
        ready.result()

    @classmethod
    def join(cls, address: str | None, cpus: float, runtime_env: dict[str, Any]) -> Session:
        """The one that is open, or a new one."""
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra(f"the ray engine needs Ray. To install it, type: {INSTALL}")
        with cls._lock:
            if cls._open is None:
                cls._open = cls(address, cpus, runtime_env)
            elif not _is_local(address) and address != cls._open.address:
                raise UsageError(
                    f"an engine of this process is on another Ray ({cls._open.address or 'of this machine alone'}), so "
                    f"{address} cannot be joined. Close that engine first"
                )
            cls._open.users += 1
            return cls._open

    def leave(self) -> None:
        """An engine is done with it."""
        with self._lock:
            self.users -= 1
            if self.users:
                return
            type(self)._open = None
            self._left.set()
            if self._thread is not None:
                self._thread.join()

    def _live(self, address: str | None, cpus: float, ready: Future[None]) -> None:
        """Start or join Ray; stop or leave it when the last engine has closed."""
        try:
            with contextlib.ExitStack() as stack:
                options: dict[str, Any] = {"logging_level": logging.ERROR}
                options |= {"log_to_driver": log.isEnabledFor(logging.DEBUG)}
                options |= {"runtime_env": self.runtime_env} if self.runtime_env else {}
                if _is_local(address):
                    reaper = Reaper()
                    stack.callback(reaper.close)
                    stack.callback(self.ray.shutdown)
                    self._start(reaper, cpus, options)
                else:
                    stack.callback(self.ray.shutdown)
                    self._connect(str(address), options)
                if not log.isEnabledFor(logging.DEBUG):
                    self._hush()
                ready.set_result(None)
                self._left.wait()
        except BaseException as error:
            if ready.done():
                log.exception("Ray could not be stopped")
            else:
                ready.set_exception(error)

    def _start(self, reaper: Reaper, cpus: float, options: dict[str, Any]) -> None:
        self.started = True
        folder = tempfile.mkdtemp(prefix=f"shoal-ray-{os.getpid()}-", dir=FOLDERS)
        reaper.remove(folder)
        with (
            _variables(WORKER_ENVIRONMENT | reaper.variables | {"PYTHONPATH": python_path()} | RAY_ENVIRONMENT),
            warnings.catch_warnings(),
        ):
            # Ray forks to start its processes, which become other programs at once. JAX warns of those that do not.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            try:
                self.ray.init("local", num_cpus=cpus, include_dashboard=False, _temp_dir=folder, **options)
            except Exception as error:
                raise EngineError(
                    f"Ray could not be started: {brief(error)}. Likely causes: too little memory, or a full disk ("
                    f"{FOLDERS}, and shared memory)"
                ) from error

    def _hush(self) -> None:
        """Ray prints half a page for each worker that is lost, which Shoal says in one line. Ends what prints."""
        with contextlib.suppress(AttributeError):  # another version of Ray; then it prints
            worker = self.ray._private.worker.global_worker
            worker.threads_stopped.set()  # first: without it the thread would ask a closed subscriber again and again
            worker.gcs_error_subscriber.close()

    def _connect(self, address: str, options: dict[str, Any]) -> None:
        host, _, port = address.rpartition(":")
        if address.startswith("ray://"):
            raise UsageError(
                f"RAY_ADDRESS={address} is the address of a Ray client server, by which nodes cannot be reached. "
                f"Give the cluster's own: HOST:PORT, where PORT is 6379 unless told (--engine ray://HOST:PORT)"
            )
        if address != "auto":
            _demand_token(host)
            try:
                socket.create_connection((host, int(port)), timeout=_CONNECT).close()
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"no Ray cluster answers at {address}: {error}. Start one with `ray start --head` or `shoal up`"
                ) from None
        try:
            self.ray.init(address, **options)
        except Exception as error:
            raise UsageError(
                f"the Ray cluster at {address} could not be joined: {brief(error)}. This machine has to be one of its "
                f"nodes; to make it one that only learns, type: ray start --address={address} --num-cpus=0"
            ) from None
        _demand_token(self.ray.get_runtime_context().gcs_address.rpartition(":")[0])


def take_signals_back() -> None:
    """Ray's C++ code has put itself before Python's handler of SIGTERM, to print a stack that says nothing to users."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _is_local(address: str | None) -> bool:
    return address in (None, "", "local")


def _demand_token(host: str) -> None:
    """Whoever reaches a Ray without tokens can run code on it, and on whoever joins it."""
    if _is_loopback(host):
        return
    mode = os.environ.get("RAY_AUTH_MODE")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if mode is None and ("RAY_AUTH_TOKEN" in os.environ or path.is_file()):
        return  # Ray uses it
    if mode is None or mode.lower() != "token":
        raise UsageError(
            f"the Ray cluster at {host} is on a network, and Ray's token authentication is off: anyone who reaches it "
            f"could run code here. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token, on "
            f"every node and here (`ray get-auth-token --generate` makes one; `shoal up` does all of it)"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what is started inside of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def brief(error: BaseException) -> str:
    """The end of a report of Ray, where what happened stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"
