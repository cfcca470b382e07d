"""The peers: their virtualenv, created on first use, and how scripts are started in it.

The scripts in this folder run with the peers' Python, never with Shoal's, and import nothing from Shoal.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.options import Say
from bench.rounds import SideFailed
from bench.watch import TrainingProgram
from shoal.base.host import BLAS_THREADS

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
_STAMP = "shoal-peers"
_NAMES = ("stable-baselines3", "sb3-contrib", "sbx-rl", "ray", "evotorch", "torch", "jax", "gymnasium")


@dataclass(frozen=True)
class EnvLayout:
    """How a peer runs its environments."""

    envs: int
    subprocesses: bool = False
    """Whether each environment has its own process; otherwise all are in the process that learns."""
    threads: int | None = None
    """Threads for arithmetic; None leaves the number to the library."""

    def __str__(self) -> str:
        where = "subprocesses" if self.subprocesses else "in-process"
        return f"{self.envs} {where}{'' if self.threads is None else f', {self.threads} thread'}"


class Peers:
    """The peers' virtualenv. If it cannot be created, each measurement of a peer raises `SideFailed`."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.missing: str | None = None
        """Why there are no peers; None if there are."""
        self._make(say)

    def _make(self, say: Say) -> None:
        wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
        stamp = self.folder / _STAMP
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        say(f"Installing the peers into {self.folder} (once; several gigabytes)")
        self._call([sys.executable, "-m", "venv", str(self.folder)])
        for block in blocks(REQUIREMENTS.read_text()):
            self._call([str(self.python), "-m", "pip", "install", "--quiet", *block])
        if self.missing is None:
            stamp.write_text(wanted)
        else:
            say(f"warning: peers will not be measured: {self.missing}")

    def _call(self, command: list[str]) -> None:
        if self.missing is not None:
            return
        try:
            done = subprocess.run(
                command, env=_environment(), capture_output=True, text=True, check=False, errors="replace"
            )
        except OSError as error:
            self.missing = f"{command[0]}: {error.strerror}"
            return
        if done.returncode:
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            self.missing = f"not installed: {lines[-1].strip() if lines else f'exit code {done.returncode}'}"

    def program(self, script: str, job: Mapping[str, object], threads: int | None = None) -> TrainingProgram:
        """Run one of the scripts with a job; `threads` is for arithmetic, and None leaves it to the library."""
        environment = _environment()
        del environment["HOME"]  # `running` sets it to the temporary folder, which is deleted afterwards
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        path = Path(script) if Path(script).is_absolute() else HERE / f"{script}.py"
        return TrainingProgram([str(self.python), "-P", str(path), json.dumps(job)], environment)

    def stable_baselines(
        self,
        library: str,
        algo: str,
        env: str,
        layout: EnvLayout,
        settings: Mapping[str, object],
        steps: int,
        seed: int = 0,
    ) -> TrainingProgram:
        """Train with Stable-Baselines3 ("sb3"), "sb3-contrib" or "sbx"."""
        job = {
            "library": library, "algo": algo, "env": env, "envs": layout.envs, "subprocesses": layout.subprocesses,
            "seed": seed, "steps": steps, "settings": settings,
        }  # fmt: skip
        return self.program("sb3", job, layout.threads)

    def check(self) -> None:
        """Raise `SideFailed` if there are no peers."""
        if self.missing is not None:
            raise SideFailed(self.missing)

    def versions(self) -> dict[str, str]:
        """List the installed versions; empty if there are no peers."""
        if self.missing is not None:
            return {}
        code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {_NAMES!r}}}))"
        command = [str(self.python), "-P", "-c", code]
        done = subprocess.run(command, env=_environment(), capture_output=True, check=False)
        found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found


def blocks(text: str) -> list[list[str]]:
    """Split requirements at empty lines into one list for each call of pip."""
    found = [[line for line in block.splitlines() if not line.startswith("#")] for block in text.split("\n\n")]
    return [block for block in found if block]


def _environment() -> dict[str, str]:
    """Remove Shoal's changes from the environment, so that peers find their packages and choose their threads."""
    ours = ("PYTHONPATH", *BLAS_THREADS, "NPROC", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {"HOME": "/", **kept, "RAY_USAGE_STATS_ENABLED": "0"}
