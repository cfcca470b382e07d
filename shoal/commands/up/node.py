"""Ray on one machine: start it, watch it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.base.lifetime import Reaper
from shoal.engines.ray.session import LOOPBACK, RAY_ENVIRONMENT, SESSION_ROOT
from shoal.spmd.launching import without_rank

_STARTED = "Ray runtime started"  # printed by `ray start` once it is done
LOOPBACK_IP = "127.0.0.1"


@dataclass(frozen=True)
class NodeSpec:
    """How to start a node."""

    ip: str
    cores: Sequence[int]
    """Numbers of the cores that Ray may use."""
    limit: int | None
    """At most this many CPUs, if the scheduler sets a limit."""
    token: str
    """Secret of the cluster."""
    address: str | None = None
    """Cluster to join; None starts a new one, with this machine as Ray's head node."""
    folder: str | None = None
    """Session folder of the cluster to join."""
    port: int = 0
    """Port of a new cluster; 0 is any free one."""

    @property
    def cpus(self) -> int:
        return min(self.limit or len(self.cores), len(self.cores))


@dataclass(frozen=True)
class LocalNode:
    """Ray's processes on this machine. They end with the reaper that they were started with."""

    folder: str
    """Ray's session folder."""
    log: Path
    """Output of `ray start`; logs are kept in the same folder."""
    variables: Mapping[str, str]
    """Environment variables of processes that may use this Ray and end with this rank."""
    _process: subprocess.Popen[bytes]
    _joined: str | None

    @classmethod
    def start(cls, spec: NodeSpec, reaper: Reaper, log: Path) -> LocalNode:
        """Start Ray without waiting for it; see `is_up` and `failure`."""
        folder = _session_folder(spec, reaper)
        variables = reaper.variables | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": _token_file(spec, reaper)}
        if spec.ip == LOOPBACK_IP:
            variables |= LOOPBACK
        if hasattr(os, "sched_setaffinity"):  # inherited by Ray; the launcher may have bound this rank
            os.sched_setaffinity(0, spec.cores)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *_ray_start(spec, folder)],
                env=without_rank(os.environ) | variables | RAY_ENVIRONMENT | {"RAY_ADDRESS": ""},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(folder, log, variables, process, spec.address)

    @property
    def is_up(self) -> bool:
        return _STARTED in self.log.read_text(errors="replace") and bool(self.address)

    @property
    def failure(self) -> str:
        """Exit code and last output of a Ray that has ended; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"Ray ended with exit code {code}. The last lines of {self.log}:\n  " + "\n  ".join(lines[-8:])

    @property
    def address(self) -> str:
        """Address of the cluster. Empty on a head node that is not up: Ray writes it shortly after it has started."""
        file = Path(self.folder) / "ray_current_cluster"
        return self._joined or (file.read_text().strip() if file.exists() else "")

    def keep_logs(self) -> None:
        """Copy Ray's logs from this machine to the shared folder."""
        with contextlib.suppress(OSError, shutil.Error):  # Ray may still be writing, or may never have started
            shutil.copytree(Path(self.folder) / "session_latest" / "logs", self.log.parent, dirs_exist_ok=True)


def _session_folder(spec: NodeSpec, reaper: Reaper) -> str:
    """Return Ray's session folder, which the reaper removes."""
    if spec.folder is not None and Path(spec.folder).exists():
        return spec.folder  # Ray's head node is on this machine too, and rank 0 removes the folder
    folder = spec.folder or tempfile.mkdtemp(prefix="shoal-up-", dir=SESSION_ROOT)
    reaper.remove(folder)
    return folder


def _token_file(spec: NodeSpec, reaper: Reaper) -> str:
    folder = tempfile.mkdtemp(prefix="shoal-up-")
    reaper.remove(folder)
    file = Path(folder) / "token"
    file.touch(0o600)
    file.write_text(spec.token)
    return str(file)


def _ray_start(spec: NodeSpec, folder: str) -> list[str]:
    """Arguments of `ray`. Ports are any free ones, because other Rays may run on this machine."""
    words = ["start", "--block", f"--node-ip-address={spec.ip}", f"--num-cpus={spec.cpus}", "--disable-usage-stats"]
    words += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if spec.address is not None:
        return [*words, f"--address={spec.address}"]
    return [*words, "--head", f"--port={spec.port}", "--include-dashboard=false", f"--temp-dir={folder}"]
