"""Ray on one machine: start it, watch it, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.spmd.launching import without_rank
from shoal.up import keeper

_UP = "Ray runtime started"  # what `ray start` says when it is done
LOOPBACK = "127.0.0.1"
STAY_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""What Ray does on a Mac unless told: stay on loopback, with no port open to the network."""
_GRACE = 5.0  # seconds for Ray's processes to end when asked


class Keeper:
    """The rank's side of `keeper.py`: whatever is started with `variables` ends with this rank."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        command = [sys.executable, "-I", "-S", keeper.__file__, self.mark, str(_GRACE)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        """An environment for what shall end with this rank, and is no rank itself."""
        return without_rank(os.environ) | {keeper.MARK: self.mark} | dict(more)

    def remove(self, folder: str) -> None:
        """Also remove a folder in the end."""
        stream = self._process.stdin
        if stream is None:
            raise AssertionError("the keeper has a standard input")
        stream.write(f"{folder}\n")
        stream.flush()

    def close(self) -> None:
        """End everything, and wait until it is gone. Twice is fine."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class Node:
    """Ray's processes on this machine. `address` is None on the head."""

    def __init__(
        self,
        keeper: Keeper,
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
        self.folder = folder or tempfile.mkdtemp(prefix="shoal-up-", dir="/tmp")  # short: sockets are in it
        keeper.remove(self.folder)
        own = tempfile.mkdtemp(prefix="shoal-up-")
        keeper.remove(own)
        token_file = Path(own) / "token"
        token_file.touch(0o600)
        token_file.write_text(token)
        self.log = log
        if hasattr(os, "sched_setaffinity"):  # what is started inherits it; the launcher may have bound this rank
            os.sched_setaffinity(0, cores)
        self.cpus = min(limit or len(cores), len(cores))
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
        """With which processes of this machine find and may use Ray."""
        if ip == LOOPBACK:
            self.variables |= STAY_LOCAL
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
                env=keeper.variables(self.variables | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def up(self) -> bool:
        """Whether it has started."""
        return _UP in self.log.read_text(errors="replace")

    @property
    def ended(self) -> str:
        """How it ended, or nothing while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"Ray ended with exit code {code}. The last lines of {self.log}:\n  " + "\n  ".join(lines[-8:])

    def address(self) -> str:
        """Of the cluster; on the head, once it is up."""
        return (Path(self.folder) / "ray_current_cluster").read_text().strip()

    def keep_logs(self, into: Path) -> None:
        """Copy what Ray has written on this machine to where all can see it."""
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(Path(self.folder) / "session_latest" / "logs", into, dirs_exist_ok=True)
