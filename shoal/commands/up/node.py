"""Ray on one machine: start it, watch it, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shoal.base.lifetime import Reaper
from shoal.engines.ray.session import LOOPBACK, RAY_ENVIRONMENT, SESSION_ROOT
from shoal.spmd.launching import without_rank

_UP = "Ray runtime started"  # what `ray start` says when it is done
HERE = "127.0.0.1"


class Node:
    """Ray's processes on this machine. `address` is None on the head."""

    def __init__(
        self,
        reaper: Reaper,
        *,
        ip: str,
        cores: Sequence[int],
        limit: int | None,
        token: str,
        log: Path,
        address: str | None = None,
        folder: str | None = None,
        port: int = 0,
    ) -> None:
        ours = folder is None or not Path(folder).exists()  # else the head is on this machine too, and sees to it
        self.folder = folder or tempfile.mkdtemp(prefix="shoal-up-", dir=SESSION_ROOT)
        if ours:
            reaper.remove(self.folder)
        own = tempfile.mkdtemp(prefix="shoal-up-")
        reaper.remove(own)
        token_file = Path(own) / "token"
        token_file.touch(0o600)
        token_file.write_text(token)
        self.log = log
        self._joined = address
        if hasattr(os, "sched_setaffinity"):  # what is started inherits it; the launcher may have bound this rank
            os.sched_setaffinity(0, cores)
        self.cpus = min(limit or len(cores), len(cores))
        self.variables = reaper.variables | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
        """With which processes of this machine may use Ray, and end with this rank."""
        if ip == HERE:
            self.variables |= LOOPBACK
        words = ["start", "--block", f"--node-ip-address={ip}", f"--num-cpus={self.cpus}", "--disable-usage-stats",
                 # Free ones: other people's Ray, or a second node of ours, may run here.
                 "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]  # fmt: skip
        if address is None:
            words += ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        else:
            words += [f"--address={address}"]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *words],
                env=without_rank(os.environ) | self.variables | RAY_ENVIRONMENT | {"RAY_ADDRESS": ""},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def up(self) -> bool:
        """Whether it has started."""
        return _UP in self.log.read_text(errors="replace") and bool(self.address)

    @property
    def ended(self) -> str:
        """How it ended, or nothing while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"Ray ended with exit code {code}. The last lines of {self.log}:\n  " + "\n  ".join(lines[-8:])

    @property
    def address(self) -> str:
        """Of the cluster. Nothing on a head that is not up: Ray says that it has started, then writes this down."""
        file = Path(self.folder) / "ray_current_cluster"
        return self._joined or (file.read_text().strip() if file.exists() else "")

    def keep_logs(self) -> None:
        """Copy what Ray has written on this machine to where all can see it."""
        with contextlib.suppress(OSError, shutil.Error):  # Ray may still write, or never have begun
            shutil.copytree(Path(self.folder) / "session_latest" / "logs", self.log.parent, dirs_exist_ok=True)
