"""The driver: the user's command, run once, on rank 0's machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence

from shoal.errors import UsageError

_LOOK = 0.1  # seconds between looks at the process group


class Driver:
    """A running driver, in a separate process group."""

    def __init__(self, process: subprocess.Popen[bytes], words: Sequence[str], grace: float) -> None:
        self._process = process
        self.command = shlex.join(words)
        self.pid = process.pid
        self._grace = grace
        self._asked_at: float | None = None

    @classmethod
    def start(cls, words: Sequence[str], variables: Mapping[str, str], grace: float) -> Driver:
        """Run a command. After a signal it has `grace` seconds to save and end."""
        try:
            return cls(subprocess.Popen(words, env=variables, start_new_session=True), words, grace)
        except OSError as error:
            raise UsageError(f"the command {words[0]!r} cannot be started: {error.strerror}") from None

    def poll(self) -> int | None:
        """Return the exit code as a shell does (128 + N for signal N); None while the driver runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def is_stopping(self) -> bool:
        return self._asked_at is not None

    def ask_to_stop(self, number: int) -> None:
        """Send a signal to the process group."""
        self._asked_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill_when_overdue(self) -> None:
        """Kill the driver once the grace period after a signal is over."""
        if not self._has_time():
            self._process.kill()

    def wait_for_group(self) -> None:
        """After a signal, wait for the rest of the process group: a shell ends at once, its children may be saving."""
        while self.is_stopping and self._has_time() and self._has_group():
            time.sleep(_LOOK)

    def _has_time(self) -> bool:
        return self._asked_at is None or time.monotonic() - self._asked_at <= self._grace

    def _has_group(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True
