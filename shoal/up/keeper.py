"""Ends all that a rank of `shoal up` has started on this machine, when the rank is gone.

A process of its own, which a launcher that kills its ranks does not see. It waits for the end of its standard input,
which the rank holds open. Then it ends every process that has the rank's mark in its environment, children of children
too, and removes the rank's folders. Needs nothing but Python, so that it starts at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "SHOAL_UP"
"""Environment variable by which the processes of a rank are known."""


def marked(mark: str) -> list[int]:
    """Processes that carry a mark, without this one and without the dead."""
    found = []
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def end(mark: str, grace: float) -> None:
    """End what carries a mark: by asking, then by force."""
    deadline = time.monotonic() + grace
    _signal(marked(mark), signal.SIGTERM)
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)
        left = marked(mark)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def main() -> None:
    """Arguments: the mark, seconds of grace. Lines of standard input are folders to remove in the end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folders = [line.rstrip("\n") for line in sys.stdin]
    end(sys.argv[1], float(sys.argv[2]))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
