"""The ranks of this script, and the check that all of them make the same call.

MPI hangs when ranks make different calls. So every collective call begins with a small exchange (`World.agree`) of a
hash: of the call, its line in the script, and whatever the ranks must have in common. Ranks that differ, and ranks that
do not arrive in time, are named in the error.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
import os
import struct
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.errors import MissingExtra, RanksDiffer, UsageError
from shoal.spmd.launching import INSTALL, launched_rank
from shoal.spmd.sharing import OwnGpus

TIMEOUT = "SHOAL_SPMD_TIMEOUT"
EXIT_DIFFERENT = 2  # the ranks make different calls
EXIT_TIMEOUT = 124  # as timeout(1)

_END = "the end of the script"
_HERE = str(Path(__file__).parent) + os.sep
_SPIN = 2e-4  # seconds of busy waiting; longer waits yield the core
_ANNOUNCE = 10.0  # seconds of waiting after which a rank tells the others where it is


def rank() -> int:
    """Rank of this process: 0 to `size() - 1`."""
    return world().rank


def size() -> int:
    """Number of processes that run this script."""
    return world().size


def is_root() -> bool:
    """Whether this is rank 0, which gathers, updates and prints."""
    return world().rank == 0


def print0(*values: object, **options: Any) -> None:
    """Call `print` on rank 0 only."""
    if is_root():
        print(*values, **options)


class World:
    """The ranks of this script. `mpi` is mpi4py's module MPI, or None with a single process."""

    def __init__(self, mpi: Any = None, timeout: float = 300.0) -> None:
        self.rank, self.size, self.mpi, self.timeout = 0, 1, mpi, timeout
        if mpi is None:
            return
        self.comm = mpi.COMM_WORLD.Dup()  # never confused with messages that the script itself sends
        self.rank, self.size = self.comm.rank, self.comm.size
        self._side = mpi.COMM_WORLD.Dup()  # for announcements
        self._calls = 0
        self._heard: dict[int, tuple[int, str]] = {}  # rank -> number of its call, and the call
        self._sent: list[tuple[Any, bytes]] = []

    def agree(self, verb: str, what: str = "", problem: str = "") -> list[str]:
        """Wait until all ranks make the same call: `verb`, from the same line of the script.

        `what` describes what the ranks must have in common. Returns `[what]` if it is equal on all, else one entry per
        rank. A `problem` on any rank raises RanksDiffer on all. Different calls, or ranks that do not arrive within the
        time limit, end the script.
        """
        if self.mpi is None:
            if problem:
                raise UsageError(f"{verb}: {problem}")
            return [what]
        call = _END if verb == _END else f"{verb} at {_caller()}"
        problem = " ".join(problem.split())  # newlines separate the parts below
        text = f"{call}\n{problem}\n{what}".encode()
        mine = hashlib.blake2b(text, digest_size=8).digest()
        table = bytearray(8 * self.size)
        self._wait(self.comm.Iallgather([mine, self.mpi.BYTE], [table, self.mpi.BYTE]), call)
        if bytes(table) == mine * self.size and not problem:
            return [what]
        texts = self.exchange(text)
        calls, problems, whats = zip(*(one.split("\n", 2) for one in texts), strict=True)
        if len(set(calls)) > 1:
            self._end_of_differing(list(calls))
        if any(problems):
            raise RanksDiffer([f"{call}: rank {r}: {one}" for r, one in enumerate(problems) if one])
        return list(whats)

    def exchange(self, text: bytes) -> list[str]:
        """Return the texts of all ranks. Without a time limit: only after a call that all ranks have made."""
        length, lengths = bytearray(struct.pack("=i", len(text))), bytearray(4 * self.size)
        self.comm.Allgather([length, self.mpi.BYTE], [lengths, self.mpi.BYTE])
        counts = list(struct.unpack(f"={self.size}i", lengths))
        texts = bytearray(sum(counts))
        self.comm.Allgatherv([text, self.mpi.BYTE], [texts, counts, self.mpi.BYTE])
        ends = [sum(counts[: r + 1]) for r in range(self.size)]
        return [texts[end - count : end].decode() for end, count in zip(ends, counts, strict=True)]

    def _wait(self, request: Any, call: str) -> None:
        self._calls += 1
        self._listen()
        begun, announced = time.perf_counter(), False
        while not request.Test():
            waited = time.perf_counter() - begun
            if waited < _SPIN:
                continue
            time.sleep(min(waited / 20, 1e-3))
            self._listen()
            others_wait = any(number == self._calls for number, _ in self._heard.values())
            if not announced and (others_wait or waited > min(_ANNOUNCE, self.timeout / 2)):
                self._announce(call)
                announced = True
            # At the end of the script one rank may still work alone for any length of time.
            if call != _END and waited > self.timeout:
                self._end_of_missing(call)

    def _announce(self, call: str) -> None:
        message = struct.pack("=q", self._calls) + call.encode()
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        for other in set(range(self.size)) - {self.rank}:
            self._sent.append((self._side.Isend([message, self.mpi.BYTE], other), message))

    def _listen(self) -> None:
        status = self.mpi.Status()
        while self._side.Iprobe(status=status):
            message = bytearray(status.Get_count(self.mpi.BYTE))
            self._side.Recv([message, self.mpi.BYTE], status.source)
            self._heard[status.source] = (struct.unpack_from("=q", message)[0], message[8:].decode())

    def _end_of_differing(self, calls: list[str]) -> None:
        if self.rank > 0:  # all ranks know; rank 0 reports
            time.sleep(5)
        self.abort(
            "The ranks of this script make different calls, so they would wait for each other indefinitely:\n"
            + _table(calls)
            + "\nEvery rank must make the same calls, in the same order, from the same lines. Look for a call inside "
            "`if spmd.is_root()`, a loop that not all ranks leave together, or an early exit.",
            EXIT_DIFFERENT,
        )

    def _end_of_missing(self, call: str) -> None:
        here = {self.rank: call} | {r: text for r, (number, text) in self._heard.items() if number == self._calls}
        if self.rank != min(here):
            time.sleep(5)
        missing = sorted(set(range(self.size)) - set(here))
        self.abort(
            f"Rank {self.rank} has waited {self.timeout:g} s for {_ranks(missing)}:\n"
            + _table([here.get(r, "has not arrived") for r in range(self.size)])
            + f"\nIf {_ranks(missing)} may still be working, allow more time (in seconds): put {TIMEOUT}="
            f"{2 * self.timeout:g} before the command. Otherwise look for what hangs there.",
            EXIT_TIMEOUT,
        )

    def abort(self, message: str, code: int) -> None:
        """Print a message and end all ranks; mpirun exits with `code`."""
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
        time.sleep(0.2)  # mpirun reads the message from a pipe and discards the rest on abort
        self.mpi.COMM_WORLD.Abort(code)

    def raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End all ranks after an uncaught exception, because the others would wait for this one."""
        if self.rank > 0:  # an error on all ranks is shown once, by rank 0, which then ends the others
            time.sleep(5 if isinstance(error, RanksDiffer) else 0.5)
        lines = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        code = 130 if issubclass(kind, KeyboardInterrupt) else error.exit_code if isinstance(error, UsageError) else 1
        self.abort(f"Rank {self.rank} of {self.size} raised:\n{lines}", code)


@functools.cache
def world() -> World:
    """Return the ranks of this script. The first call starts MPI, but only if a launcher started this process."""
    started = launched_rank(os.environ)
    if started is None or started.size == 1:
        return World()
    gpus = OwnGpus.of_this_process()
    gpus.choose_before_mpi()
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingExtra(
            f"{started.launcher} started this process as one of several, but mpi4py cannot be loaded ({error}). "
            f"Install it: {INSTALL}"
        ) from error
    if started.size is not None and MPI.COMM_WORLD.size != started.size:
        raise UsageError(
            f"{started.launcher} started {started.size} processes, but mpi4py sees {MPI.COMM_WORLD.size}: "
            f"they belong to different MPI installations. mpi4py uses {MPI.Get_library_version().splitlines()[0]}. "
            "Use the mpirun of that installation; with srun, try `srun --mpi=pmix`."
        )
    if MPI.COMM_WORLD.size == 1:
        return World()
    one = World(MPI, _timeout())
    sys.excepthook = one.raised
    gpus.choose(one.rank, one.exchange)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Through mpirun's pipes, output would arrive late and in blocks, and be lost if the rank is killed.
        sys.stdout.reconfigure(line_buffering=True)
    # The end of the script is a collective call too, so a rank that exits while others wait is noticed at once.
    atexit.register(one.agree, _END)
    return one


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"{TIMEOUT}={text!r} is not a number of seconds above 0 (inf: no time limit)")
    return seconds


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119  a path would cost 3 us


def _table(calls: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for r, call in enumerate(calls):
        groups.setdefault(call, []).append(r)
    return "\n".join(f"  {_ranks(members)}: {call}" for call, members in groups.items())


def _ranks(members: list[int]) -> str:
    shown = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
    return f"{'rank' if len(members) == 1 else 'ranks'} {shown}"
