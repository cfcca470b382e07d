"""Processes that end with the one that started them.

`die_with_parent` and `mortal` have the kernel kill one child. A `Reaper` covers everything else: it is a separate
process, invisible to a launcher that kills its ranks, and waits for the end of its standard input, which its owner
holds open. Then it kills every process that carries the owner's mark in its environment or writes into one of the
owner's folders, at any depth, and removes the folders.

This file needs nothing but the standard library and also runs as a script, so that it starts at once:

    python lifetime.py mortal PARENT COMMAND...    become COMMAND, killed by the kernel when PARENT dies
    python lifetime.py reap MARK                   the reaper of the process that started it
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MARK = "SHOAL_REAPED_WITH"
"""Environment variable that lists the marks of all owners a process must end with."""
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, even in the middle of a task (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)


def mortal(command: Sequence[str]) -> list[str]:
    """Wrap a command so that it ends with this process; a `preexec_fn` would not be safe next to other threads."""
    return _script("mortal", str(os.getpid()), *command)


class Reaper:
    """The owner's side: every process started with `variables` ends with this process or when `close` is called."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._process = subprocess.Popen(
            _script("reap", self.mark), stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for processes that must end with this one."""
        return {MARK: ":".join(filter(None, [os.environ.get(MARK), self.mark]))}

    def remove(self, folder: str) -> None:
        """Also kill processes that write into a folder, and remove the folder at the end."""
        if self._process.stdin is None:
            raise AssertionError("the reaper has a standard input")
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill everything that is covered and wait until it is gone. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _script(*words: str) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, *words]


def _covered(mark: str, folders: Sequence[str], owner: int) -> list[int]:
    """Find processes that carry a mark or write to a file in a folder (Ray's processes overwrite their environment)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) in (os.getpid(), owner):
            continue
        try:
            if _is_marked(entry, mark) or any(_writes(entry, folder) for folder in folders):
                found.append(int(entry.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


def _is_marked(process: Path, mark: str) -> bool:
    for variable in (process / "environ").read_bytes().split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == MARK.encode():
            return mark.encode() in value.split(b":")
    return False


def _writes(process: Path, folder: str) -> bool:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime; the other descriptors still count
            if str(descriptor.readlink()).startswith(f"{folder}/"):
                flags = (process / "fdinfo" / descriptor.name).read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                    return True
    return False


def _kill(mark: str, folders: Sequence[str], owner: int) -> None:
    """Kill covered processes: SIGTERM first, SIGKILL for those that remain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _GRACE
        signalled: set[int] = set()
        while (left := _covered(mark, folders, owner)) and time.monotonic() < deadline:
            for pid in set(left) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled.update(left)
            time.sleep(0.05)


def _reap(mark: str) -> None:
    """Wait for the end of standard input, whose lines are folders to remove; then kill and remove."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner = os.getppid()
    folders = [line.rstrip("\n") for line in sys.stdin]
    _kill(mark, folders, owner)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "reap":
        _reap(sys.argv[2])
    else:
        die_with_parent(int(sys.argv[2]))
        os.execv(sys.argv[3], sys.argv[3:])  # noqa: S606 - exactly the caller's command, without a shell
