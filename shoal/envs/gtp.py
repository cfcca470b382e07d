"""Programs that play Go, by the Go Text Protocol: https://www.lysator.liu.se/~gunnar/gtp/."""

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

_GAMES = "/usr/games"  # where Debian puts them, which not every PATH has
_MOST = 65536  # bytes of an answer: more is not one


class Program:
    """A program that plays. It is started when it is first asked, and ends with this process at the latest."""

    def __init__(self, command: str, timeout: float) -> None:
        refuse_module(__name__)  # a message that names a command is as good as one that runs it
        words = shlex.split(command)
        if not words:
            raise gymnasium.error.Error("the opponent must be random, gnugo or a command, not nothing")
        path = shutil.which(words[0]) or shutil.which(words[0], path=_GAMES)
        if path is None:
            raise gymnasium.error.DependencyNotInstalled(
                f"there is no program {words[0]!r} to play against. To get one that works, type: apt-get install gnugo"
            )
        self._command, self._words, self._timeout = command, [str(Path(path).absolute()), *words[1:]], timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._knows: set[str] = set()

    def begin(self, size: int, komi: float, seed: int) -> None:
        """A new game."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                mortal(self._words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
            self._knows = set(self.ask("list_commands").split())
        for command in (f"boardsize {size}", "clear_board", f"komi {komi:g}"):
            self.ask(command)
        if "set_random_seed" in self._knows:  # not every program has seeds, and of those that do not all keep to them
            self.ask(f"set_random_seed {seed}")

    def ask(self, command: str) -> str:
        """The answer to a command. A refusal, nonsense, silence or an end is a fault."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EnvironmentFault(f"the Go program {self._command!r} was asked {command!r} before its game began")
        try:
            process.stdin.write(f"{command}\n".encode())
        except BrokenPipeError:
            raise self._fault(command, f"has ended with exit code {process.wait()}") from None
        text, deadline = b"", time.monotonic() + self._timeout
        while not text.strip() or not text.replace(b"\r", b"").endswith(b"\n\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._end()
                raise self._fault(command, f"has not answered for {self._timeout:g} s")
            piece = os.read(process.stdout.fileno(), 4096)
            text += piece
            if not piece:
                said = f", after saying {_quoted(text)}" if text.strip() else ""
                raise self._fault(command, f"has ended with exit code {process.wait()}{said}")
            if text.lstrip()[:1] not in (b"", b"=", b"?") or len(text) > _MOST:
                self._end()
                raise self._fault(command, f"answers {_quoted(text)}")
        answer = text.strip()
        if answer.startswith(b"?"):
            raise self._fault(command, f"answers {_quoted(answer)}")
        return answer[1:].strip().decode("ascii", "replace")

    def close(self) -> None:
        """End it."""
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
            f"the Go program {self._command!r} {what}, when asked {command!r}. "
            f"Is it one that speaks the Go Text Protocol, with the flags that make it? To try, type: "
            f"printf 'genmove b\\nquit\\n' | {self._command}"
        )


def _quoted(answer: bytes) -> str:
    text = answer.strip().decode("ascii", "replace")
    return repr(text if len(text) < 80 else f"{text[:80]}...")
