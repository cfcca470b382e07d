"""Ends all that a process has started on this machine, when the process is gone, however that came.

The keeper is a process of its own, which a launcher that kills its ranks does not see. It waits for the end of its
standard input, which its owner holds open. Then it ends every process that has the owner's mark in its environment
or writes into one of the owner's folders, children of children too, and removes the folders. It needs nothing but
Python, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MARK = "SHOAL_KEPT"
"""Environment variable with the marks of those with whom a process shall end."""
_GRACE = 5.0  # seconds to end in when asked


class Keeper:
    """The owner's side: whatever is started with `variables` ends with this process, or by `close`."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of what shall end with this process."""
        return {MARK: ":".join(filter(None, [os.environ.get(MARK), self.mark]))}

    def remove(self, folder: str) -> None:
        """Also end what writes into a folder, and remove it."""
        if self._process.stdin is None:
            raise AssertionError("the keeper has a standard input")
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End everything, and wait until it is gone. Twice is fine."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def kept(mark: str, folders: Sequence[str], owner: int) -> list[int]:
    """Processes that carry a mark, or are writing to a file in a folder: those of Ray overwrite their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) in (os.getpid(), owner):
            continue
        try:
            if _is_marked(entry, mark) or any(_writes(entry, folder) for folder in folders):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def _is_marked(process: Path, mark: str) -> bool:
    for variable in (process / "environ").read_bytes().split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == MARK.encode():
            return mark.encode() in value.split(b":")
    return False


def _writes(process: Path, folder: str) -> bool:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, which says nothing about the others
            if str(descriptor.readlink()).startswith(f"{folder}/"):
                flags = (process / "fdinfo" / descriptor.name).read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                    return True
    return False


def end(mark: str, folders: Sequence[str], owner: int, grace: float) -> None:
    """End what is kept: by asking, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        asked: set[int] = set()
        while (left := kept(mark, folders, owner)) and time.monotonic() < deadline:
            for pid in set(left) - asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            asked.update(left)
            time.sleep(0.05)


def main() -> None:
    """The argument is the mark. Lines of standard input are folders to remove in the end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner = os.getppid()
    folders = [line.rstrip("\n") for line in sys.stdin]
    end(sys.argv[1], folders, owner, _GRACE)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
