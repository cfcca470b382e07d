"""The folder of a run.

runs/trpo-CartPole-v1-0007/
  config.json         everything needed to repeat the run; versions; fingerprint
  metrics.jsonl       one line per iteration: the source of truth for tables, plots and trackers
  policy.safetensors  the newest policy with its observation statistics
  best.safetensors    with --eval-every, the policy with the highest mean return in an evaluation
  checkpoints/000120/ state.safetensors, manifest.json (sizes, sha256), and the policy of that iteration
  lock                held by the process that trains the run
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired, TextIO, TypedDict

import safetensors

from shoal.base import disk
from shoal.base.trees import Tree
from shoal.errors import CheckpointFault, DiskFault, RunBusy, UsageError
from shoal.policies.policy import SavedPolicy
from shoal.runs.checkpoints import POLICY, Checkpoint, read_checkpoint, write_checkpoint
from shoal.runs.metrics import MetricsRow

log = logging.getLogger("shoal.run")

CONFIG = "config.json"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def name_problems(name: str) -> list[str]:
    """Describe what is wrong with the name of a run."""
    if _NAME.fullmatch(name) and ".." not in name:
        return []
    return [
        f"{name!r} is not a valid name for a run: use 1 to 64 of A-Z a-z 0-9 . _ - with no dot at the start and no '..'"
    ]


def policy_file(name: str, root: Path) -> Path:
    """Locate the policy file of a run, given by name or path, of a checkpoint's folder, or given directly."""
    if name.endswith(".safetensors"):
        return Path(name)
    if (Path(name) / "manifest.json").is_file():
        return Path(name) / POLICY
    return RunDir.find(root, name).policy_file


class RunRecord(TypedDict):
    """The content of config.json: everything needed to repeat or resume a run."""

    algo: str
    settings: dict[str, Any]
    """Fields of `Settings`."""
    config: dict[str, Any]
    """Fields of the algorithm's settings, with lists for tuples."""
    versions: dict[str, str]
    """Packages that the head's results depend on, and a digest of the algorithm's code."""
    fingerprint: dict[str, str]
    """Fingerprint of the head, which workers had to match."""
    schedule_ends: NotRequired[dict[str, int]]
    """Iteration -> environment steps at which schedules end from there on: a resume with a new goal moves the end."""
    folders: NotRequired[dict[str, str]]
    """Module of the user -> folder in which it was found."""


class RunDir:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / CONFIG
        self.metrics_file = path / "metrics.jsonl"
        self.policy_file = path / POLICY
        self.best_file = path / "best.safetensors"
        self.checkpoints = path / "checkpoints"

    @property
    def name(self) -> str:
        """Name of the run: the folder's last component."""
        return self.path.name

    @staticmethod
    def create(root: Path, name: str | None, stem: str, record: RunRecord) -> RunDir:
        """Create a folder, called `name` or `stem` and the next free number."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = _claim(root, name, re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:48])
            run = RunDir(path)
            run.checkpoints.mkdir()
            run.write_record(record)
        except OSError as error:
            raise UsageError(f"no run can be created in {root}: {error.strerror}") from None
        return run

    @staticmethod
    def find(root: Path, name: str) -> RunDir:
        """Find a run by its name, or by the path of its folder."""
        for path in (root / name, Path(name)):
            try:
                if (path / CONFIG).is_file():
                    return RunDir(path)
            except OSError as error:
                raise UsageError(f"the run {path} cannot be read: {error.strerror}") from None
        known = [path.parent.name for path in root.glob(f"*/{CONFIG}")]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"To list its runs, use: shoal runs --runs {root}"
        raise UsageError(f"there is no run {name!r} in {root}. {hint}")

    @staticmethod
    def all(root: Path) -> list[RunDir]:
        """List every run in a folder, oldest first."""
        found = [RunDir(path.parent) for path in root.glob(f"*/{CONFIG}")]
        return sorted(found, key=lambda run: run.config_file.stat().st_mtime)

    def discard(self) -> None:
        """Remove the folder if it holds no iteration yet."""
        if not self.metrics() and not self.saved():
            shutil.rmtree(self.path)

    def record(self) -> RunRecord:
        """Read and check config.json."""
        try:
            record: RunRecord = json.loads(self.config_file.read_bytes())
            missing = [key for key in ("algo", "settings", "config", "versions", "fingerprint") if key not in record]
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointFault(f"{self.config_file} cannot be read: {error}") from None
        if missing:
            raise CheckpointFault(f"{self.config_file} does not describe a run: it lacks {', '.join(missing)}")
        return record

    def write_record(self, record: RunRecord) -> None:
        """Replace config.json."""
        disk.write_file(self.config_file, (json.dumps(record, indent=2) + "\n").encode())

    # One head at a time ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for a block. The kernel releases the lock however the process ends."""
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
                raise DiskFault(f"{self.path} cannot be locked for training: {error.strerror}") from None
            yield

    def _seize(self, file: TextIO) -> None:
        deadline = time.monotonic() + 0.3  # `busy` in another process takes the lock for a moment
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise RunBusy(f"{self.path} is being trained by {owner}. Wait for its end, or stop it first") from None
            return

    def busy(self) -> bool:
        """Test whether a process is training the run now."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no lock yet, or no permission to read it
            return False
        return False

    # Metrics --------------------------------------------------------------------------------------------------

    def metrics(self) -> list[MetricsRow]:
        """Read all complete lines. A last line cut short by a crash is skipped; a damaged one too, with a warning."""
        if not self.metrics_file.exists():
            return []
        found = []
        for number, line in enumerate(self.metrics_file.read_bytes().split(b"\n")[:-1], start=1):
            try:
                found.append(json.loads(line))
            except ValueError:
                log.warning("skipped line %d of %s, which is damaged", number, self.metrics_file)
        return found

    def cut_metrics(self, iteration: int) -> None:
        """Drop the iterations after this one, which a resume computes again."""
        kept = [line for line in self.metrics() if line["iteration"] <= iteration]
        content = "".join(json.dumps(line) + "\n" for line in kept).encode()
        if not self.metrics_file.exists() or self.metrics_file.read_bytes() != content:
            disk.write_file(self.metrics_file, content)

    # Checkpoints ----------------------------------------------------------------------------------------------

    def save(self, iteration: int, state: Tree, policy: SavedPolicy, keep: int) -> None:
        """Write a checkpoint and the policy file, then remove all but the newest `keep` checkpoints."""
        content = policy.to_bytes()
        write_checkpoint(self.checkpoints / f"{iteration:06}", iteration, state, content)
        disk.write_file(self.policy_file, content)
        for folder in self._folders()[keep:]:
            disk.remove_folder(folder)

    def load(self, before: int | None = None) -> Checkpoint:
        """Read the newest intact checkpoint, of an iteration `before` this one if given; iteration 0 if none exists."""
        folders = [folder for folder in self._folders() if before is None or int(folder.name) < before]
        problems = []
        for folder in folders:
            try:
                checkpoint = read_checkpoint(folder)
            except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
                problems.append(f"checkpoint {folder} cannot be read: {error}")
                continue
            for problem in problems:
                log.warning("%s; going back to iteration %d", problem, checkpoint.iteration)
            return checkpoint
        if folders:
            raise CheckpointFault("\n".join([*problems, f"{self.path} has no checkpoint left to resume from"]))
        return Checkpoint(0, None)

    def saved(self) -> list[int]:
        """List the iterations that have checkpoints, newest first."""
        return [int(folder.name) for folder in self._folders()]

    def _folders(self) -> list[Path]:
        found = [path for path in self.checkpoints.glob("*") if path.name.isdigit()]
        return sorted(found, key=lambda path: int(path.name), reverse=True)


def _claim(root: Path, name: str | None, stem: str) -> Path:
    if name is not None:
        path = root / name
        if path.exists():
            raise UsageError(
                f"{path} exists already. Choose another --name, or continue it: shoal resume {name} --runs {root}"
            )
        path.mkdir()
        return path
    numbers = [int(match[1]) for path in root.glob(f"{stem}-*") if (match := re.search(r"-(\d{4,})$", path.name))]
    number = max(numbers, default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):  # another run took that number first
            path = root / f"{stem}-{number:04}"
            path.mkdir()
            return path
