"""Go programs that speak the Go Text Protocol (GTP): https://www.lysator.liu.se/~gunnar/gtp/."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import gymnasium

from shoal.base.lifetime import mortal
from shoal.engines.functions import refuse_module
from shoal.errors import EnvironmentFault

_GAMES = "/usr/games"  # Debian installs games here, which is not in every PATH
_MOST = 65536  # bytes; a longer answer is not GTP


class Program:
    """A Go program as a child process, started for the first game and killed when this process ends."""

    def __init__(self, command: str, timeout: float) -> None:
        refuse_module(__name__)  # a message from the head must not make an untrusting worker run a command
        words = shlex.split(command)
        if not words:
            raise gymnasium.error.Error("the opponent is empty; it must be random, gnugo or a command")
        path = shutil.which(words[0]) or shutil.which(words[0], path=_GAMES)
        if path is None:
            raise gymnasium.error.DependencyNotInstalled(
                f"there is no program {words[0]!r} to play against. One that works: apt-get install gnugo"
            )
        self._command, self._words, self._timeout = command, [str(Path(path).absolute()), *words[1:]], timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._knows: set[str] = set()

    def begin(self, size: int, komi: float, seed: int) -> None:
        """Start a new game, and the program if it is not running."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                mortal(self._words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
            self._knows = set(self.ask("list_commands").split())
        for command in (f"boardsize {size}", "clear_board", f"komi {komi:g}"):
            self.ask(command)
        if "set_random_seed" in self._knows:  # optional in GTP; even a program that has it may not be deterministic
            self.ask(f"set_random_seed {seed}")

    def ask(self, command: str) -> str:
        """Send a command and return the answer. Raise if it refuses, times out, exits or is not GTP."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EnvironmentFault(f"the Go program {self._command!r} was sent {command!r} before a game began")
        try:
            process.stdin.write(f"{command}\n".encode())
        except BrokenPipeError:
            raise self._fault(command, f"exited with code {process.wait()}") from None
        text, deadline = b"", time.monotonic() + self._timeout
        while not text.strip() or not text.replace(b"\r", b"").endswith(b"\n\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._end()
                raise self._fault(command, f"did not answer within {self._timeout:g} s")
            piece = os.read(process.stdout.fileno(), 4096)
            text += piece
            if not piece:
                output = f" after the output {_quoted(text)}" if text.strip() else ""
                raise self._fault(command, f"exited with code {process.wait()}{output}")
            if text.lstrip()[:1] not in (b"", b"=", b"?") or len(text) > _MOST:
                self._end()
                raise self._fault(command, f"answered {_quoted(text)}")
        answer = text.strip()
        if answer.startswith(b"?"):
            raise self._fault(command, f"answered {_quoted(answer)}")
        return answer[1:].strip().decode("ascii", "replace")

    def close(self) -> None:
        """Kill the program; the next game starts it again."""
        self._end()
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _fault(self, command: str, what: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"the Go program {self._command!r} {what} when sent {command!r}. "
            f"It may need other flags to speak the Go Text Protocol. To test it: "
            f"printf 'genmove b\\nquit\\n' | {self._command}"
        )


def _quoted(answer: bytes) -> str:
    text = answer.strip().decode("ascii", "replace")
    return repr(text if len(text) < 80 else f"{text[:80]}...")
