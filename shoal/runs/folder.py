"""A run on disk.

runs/trpo-CartPole-v1-0007/
  config.json         everything to run it again; versions; fingerprint
  metrics.jsonl       one line per iteration: the source of truth for tables, plots and trackers
  policy.safetensors  newest policy with its observation statistics
  checkpoints/000120/ state.safetensors and manifest.json (sizes, sha256)
  lock                held by the process that trains it
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import safetensors
import safetensors.numpy

from shoal.base import disk
from shoal.base.trees import Tree, flatten, unflatten
from shoal.errors import CheckpointFault, DiskFault, RunBusy, UsageError
from shoal.policies.policy import SavedPolicy

log = logging.getLogger("shoal.run")

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_FORMAT = "shoal-checkpoint-1"


def check_name(name: str) -> list[str]:
    """What is wrong with the name of a run."""
    if _NAME.fullmatch(name) and ".." not in name:
        return []
    return [
        f"{name!r} cannot be the name of a run: use 1 to 64 of A-Z a-z 0-9 . _ - with no dot at the start and no '..'"
    ]


def policy_file(name: str, root: Path) -> Path:
    """Where the policy is of a run, by its name or path, or of a policy file itself."""
    return Path(name) if name.endswith(".safetensors") else RunDir.find(root, name).policy_file


class RunDir:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.policy_file = path / "policy.safetensors"
        self.checkpoints = path / "checkpoints"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.name

    @staticmethod
    def create(root: Path, name: str | None, stem: str, config: dict[str, Any]) -> RunDir:
        """A new folder: called `name`, or `stem` and the next free number."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = _claim(root, name, re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:48])
            run = RunDir(path)
            run.checkpoints.mkdir()
            run.write_config(config)
        except OSError as error:
            raise UsageError(f"no run can be made in {root}: {error.strerror}") from None
        return run

    @staticmethod
    def find(root: Path, name: str) -> RunDir:
        """A run by name, or by the path of its folder."""
        for path in (root / name, Path(name)):
            try:
                if (path / "config.json").is_file():
                    return RunDir(path)
            except OSError as error:
                raise UsageError(f"the run {path} cannot be read: {error.strerror}") from None
        raise UsageError(
            f"there is no run {name!r} in {root}. To list the runs there are, type: shoal runs --runs {root}"
        )

    @staticmethod
    def all(root: Path) -> list[RunDir]:
        """Every run in a folder, oldest first."""
        found = [RunDir(path.parent) for path in root.glob("*/config.json")]
        return sorted(found, key=lambda run: run.config_file.stat().st_mtime)

    def discard(self) -> None:
        """Remove the folder, if nothing was learned yet."""
        if not self.metrics() and not self.saved():
            shutil.rmtree(self.path)

    def config(self) -> dict[str, Any]:
        """What the run was started with."""
        try:
            config: dict[str, Any] = json.loads(self.config_file.read_bytes())
            missing = [key for key in ("algo", "settings", "config", "versions", "fingerprint") if key not in config]
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointFault(f"{self.config_file} cannot be read: {error}") from None
        if missing:
            raise CheckpointFault(f"{self.config_file} is not a run's: it has no {', '.join(missing)}")
        return config

    def write_config(self, config: dict[str, Any]) -> None:
        """Replace it."""
        disk.write_file(self.config_file, (json.dumps(config, indent=2) + "\n").encode())

    # One head at a time ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run. The kernel lets go of it when the process ends, however it ends."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context((self.path / "lock").open("a+"))
                self._seize(file)
                file.truncate(0)
                file.write(f"pid {os.getpid()} on {socket.gethostname()}")
                file.flush()
                disk.remove_leftovers(self.path)
                disk.remove_leftovers(self.checkpoints)
            except OSError as error:
                raise DiskFault(f"{self.path} cannot be held for training: {error.strerror}") from None
            yield

    def _seize(self, file: TextIO) -> None:
        deadline = time.monotonic() + 0.3  # `busy` in another process looks for a moment
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise RunBusy(f"{self.path} is being trained by {owner}. Wait for it, or stop it first") from None
            return

    def busy(self) -> bool:
        """Whether some process is training it now."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no lock yet, or not ours to look at
            return False
        return False

    # Metrics --------------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines. One that a crash cut short is left out; one that is damaged too, with a warning."""
        if not self.metrics_file.exists():
            return []
        found = []
        for number, line in enumerate(self.metrics_file.read_bytes().split(b"\n")[:-1], start=1):
            try:
                found.append(json.loads(line))
            except ValueError:
                log.warning("line %d of %s is damaged and left out", number, self.metrics_file)
        return found

    def cut_metrics(self, iteration: int) -> None:
        """Drop the lines of iterations after this one: a resume computes them again."""
        kept = [line for line in self.metrics() if line["iteration"] <= iteration]
        content = "".join(json.dumps(line) + "\n" for line in kept).encode()
        if not self.metrics_file.exists() or self.metrics_file.read_bytes() != content:
            disk.write_file(self.metrics_file, content)

    # Checkpoints ----------------------------------------------------------------------------------------------

    def save(self, iteration: int, state: Tree, policy: SavedPolicy, keep: int) -> None:
        """Write a checkpoint and the policy file, then remove all but the newest `keep` checkpoints."""
        table = flatten(state)
        arrays = {path: np.asarray(leaf, order="C") for path, leaf in table.items() if isinstance(leaf, np.ndarray)}
        blob = safetensors.numpy.save(arrays)
        manifest: dict[str, Any] = {
            "format": _FORMAT,
            "iteration": iteration,
            "plain": {path: leaf for path, leaf in table.items() if not isinstance(leaf, np.ndarray)},
            "bytes": len(blob),
            "sha256": hashlib.sha256(blob).hexdigest(),
        }
        manifest["manifest_sha256"] = _manifest_hash(manifest)
        files = {"state.safetensors": blob, "manifest.json": json.dumps(manifest).encode()}
        disk.write_folder(self.checkpoints / f"{iteration:06}", files)
        disk.write_file(self.policy_file, policy.to_bytes())
        for folder in self._folders()[keep:]:
            disk.remove_folder(folder)

    def load(self, before: int | None = None) -> tuple[int, Tree] | None:
        """Iteration and state of the newest checkpoint that is whole; None if there was never one.

        With `before`, of those that are of an earlier iteration.
        """
        folders = [folder for folder in self._folders() if before is None or int(folder.name) < before]
        problems = []
        for folder in folders:
            try:
                iteration, state = _read(folder)
            except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
                problems.append(f"checkpoint {folder} cannot be used: {error}")
                continue
            for problem in problems:
                log.warning("%s; going back to iteration %d", problem, iteration)
            return iteration, state
        if folders:
            raise CheckpointFault("\n".join([*problems, f"no checkpoint of {self.path} is left to resume from"]))
        return None

    def saved(self) -> list[int]:
        """Iterations that there are checkpoints of, newest first."""
        return [int(folder.name) for folder in self._folders()]

    def _folders(self) -> list[Path]:
        """Checkpoints, newest first."""
        found = [path for path in self.checkpoints.glob("*") if path.name.isdigit()]
        return sorted(found, key=lambda path: int(path.name), reverse=True)


def _claim(root: Path, name: str | None, stem: str) -> Path:
    if name is not None:
        path = root / name
        if path.exists():
            raise UsageError(
                f"{path} is there already. Choose another --name, or go on with it: shoal resume {name} --runs {root}"
            )
        path.mkdir()
        return path
    numbers = [int(match[1]) for path in root.glob(f"{stem}-*") if (match := re.search(r"-(\d{4,})$", path.name))]
    number = max(numbers, default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):  # another run took that number in this moment
            path = root / f"{stem}-{number:04}"
            path.mkdir()
            return path


def _manifest_hash(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> tuple[int, Tree]:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}, and this version reads {_FORMAT!r}")
    if manifest["manifest_sha256"] != _manifest_hash(manifest):
        raise ValueError("its manifest is damaged (sha256 differs)")
    blob = (folder / "state.safetensors").read_bytes()
    if len(blob) != manifest["bytes"]:
        raise ValueError(f"state.safetensors has {len(blob):,} bytes instead of {manifest['bytes']:,}")
    if hashlib.sha256(blob).hexdigest() != manifest["sha256"]:
        raise ValueError("state.safetensors is damaged (sha256 differs)")
    return manifest["iteration"], unflatten(manifest["plain"] | safetensors.numpy.load(blob))


def resume_command(run: RunDir) -> str:
    """What to type to go on with a run."""
    return f"{program()} resume {run.name}{on_runs(run)}"


def program() -> str:
    """How to call Shoal from the shell that this was started from: it may live in a virtualenv that is not active."""
    started_as = Path(sys.argv[0])
    return str(started_as) if started_as.name == "shoal" and shutil.which("shoal") is None else "shoal"


def on_runs(run: RunDir) -> str:
    """The flag that names the folder of a run, where it is not the usual one."""
    return "" if run.path.parent == Path("runs") else f" --runs {run.path.parent}"
