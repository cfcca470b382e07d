"""Processes that end with the one that started them. The standard library alone: run as a file, it starts at once.

python parent.py PARENT COMMAND...      becomes the command, which the kernel kills when PARENT dies
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Linux: have the kernel send this process a signal when its parent dies, also in the middle of a task."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, number)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


def mortal(command: list[str]) -> list[str]:
    """A command as one that ends with this process. Not by a function between fork and exec: other threads may run."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - as the caller spelled it, without a shell
