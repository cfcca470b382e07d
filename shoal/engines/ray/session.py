"""This process's connection to Ray, shared by all engines that are open at the same time."""

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
    # By default Ray's workers yield to all other processes, and hardly run on a busy machine.
    "RAY_worker_niceness": "0",
}
"""Environment variables with which Ray is started on a machine."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment variables that keep Ray on loopback, with no port open to the network. It is the default on a Mac."""
SESSION_ROOT = Path("/tmp")  # noqa: S108  mkdtemp makes folders that only this user can read
"""Parent of Ray's session folders: short, because paths of sockets are limited to about 100 characters."""
_CONNECT = 5.0  # seconds for a cluster to answer

RuntimeEnv = dict[str, Any]
"""Ray's `runtime_env`, passed on to Ray as it is."""


class Session:
    """A connection to Ray with a thread that starts and stops it.

    The thread lives as long as the connection, because the kernel kills Ray's processes with the thread that started
    them.
    """

    _open: Session | None = None
    _lock = threading.Lock()

    def __init__(self, address: str | None, cpus: float, runtime_env: RuntimeEnv) -> None:
        if _is_local(address) and "ray" not in sys.modules:  # Ray reads the variable on import
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        with _variables(LOOPBACK if _is_local(address) else {}):
            import ray

        self.ray: Any = ray
        self.address = address
        self.runtime_env = runtime_env
        """Runtime environment of all workers of this session, on every node."""
        self.users = 0
        self.started = False
        """Whether Shoal started this Ray, for this process alone."""
        self._left = threading.Event()
        if ray.is_initialized():  # by the user, whose Ray is left as it is
            self._thread, self.runtime_env = None, {}
            return
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(address, cpus, ready), name="shoal-ray", daemon=True)
        self._thread.start()
        ready.result()

    @classmethod
    def join(cls, address: str | None, cpus: float, runtime_env: RuntimeEnv) -> Session:
        """Return the open session, or open one. Each call needs one `leave`."""
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra(f"the ray engine needs Ray. To install it, run: {INSTALL}")
        with cls._lock:
            if cls._open is None:
                cls._open = cls(address, cpus, runtime_env)
            elif not _is_local(address) and address != cls._open.address:
                raise UsageError(
                    f"{address} cannot be joined while an engine of this process uses another Ray "
                    f"({cls._open.address or 'on this machine'}). Close that engine first"
                )
            cls._open.users += 1
            return cls._open

    def leave(self) -> None:
        """Release the session for one engine; the last one closes it."""
        with self._lock:
            self.users -= 1
            if self.users:
                return
            type(self)._open = None
            self._left.set()
            if self._thread is not None:
                self._thread.join()

    def _live(self, address: str | None, cpus: float, ready: Future[None]) -> None:
        """Start or join Ray, and stop or leave it once the last engine has closed."""
        try:
            with contextlib.ExitStack() as stack:
                options: dict[str, object] = {"logging_level": logging.ERROR}
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

    def _start(self, reaper: Reaper, cpus: float, options: dict[str, object]) -> None:
        self.started = True
        folder = tempfile.mkdtemp(prefix=f"shoal-ray-{os.getpid()}-", dir=SESSION_ROOT)
        reaper.remove(folder)
        with (
            _variables(WORKER_ENVIRONMENT | reaper.variables | {"PYTHONPATH": python_path()} | RAY_ENVIRONMENT),
            warnings.catch_warnings(),
        ):
            # JAX warns of forks; Ray's are harmless because the child executes another program at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            try:
                self.ray.init("local", num_cpus=cpus, include_dashboard=False, _temp_dir=folder, **options)
            except Exception as error:
                raise EngineError(
                    f"Ray could not be started: {short_error(error)}. Likely causes: too little memory, or no space "
                    f"left in {SESSION_ROOT} or shared memory"
                ) from error

    def _hush(self) -> None:
        """Stop the thread with which Ray prints half a page per lost worker; Shoal logs one line."""
        with contextlib.suppress(AttributeError):  # in another version of Ray, which then prints
            worker = self.ray._private.worker.global_worker
            worker.threads_stopped.set()  # before the next line: else the thread polls the closed subscriber in a loop
            worker.gcs_error_subscriber.close()

    def _connect(self, address: str, options: dict[str, object]) -> None:
        host, _, port = address.rpartition(":")
        if address.startswith("ray://"):
            raise UsageError(
                f"RAY_ADDRESS={address} is the address of a Ray client server, which does not give access to the "
                f"nodes. Use the address of the cluster itself: --engine ray://HOST:PORT (Ray's default port: 6379)"
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
                f"the Ray cluster at {address} could not be joined: {short_error(error)}. This machine must be one of "
                f"its nodes; to add it as a node without workers, run: ray start --address={address} --num-cpus=0"
            ) from None
        _demand_token(self.ray.get_runtime_context().gcs_address.rpartition(":")[0])


def restore_sigterm_handler() -> None:
    """Undo Ray's C++ handler of SIGTERM, which prints a stack trace before Python's own handler runs."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _is_local(address: str | None) -> bool:
    return address in (None, "", "local")


def _demand_token(host: str) -> None:
    """Refuse a cluster on a network without token authentication: anyone who reaches it could run code here."""
    if _is_loopback(host):
        return
    mode = os.environ.get("RAY_AUTH_MODE")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if mode is None and ("RAY_AUTH_TOKEN" in os.environ or path.is_file()):
        return  # Ray uses this token by default
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
    """Set environment variables for the length of a block."""
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


def short_error(error: BaseException) -> str:
    """Shorten one of Ray's reports to its last line, which holds the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"
