"""A table of normal noise that all processes of a machine share: a direction is a place in it, one whole number.

The table follows from its seed and size alone. It lies in a file of the machine's temporary folder, is written once by
whoever needs it first and mapped read-only by all, so it takes memory once however many workers there are. It stays for
the next run; when another one is made, those that nobody has mapped are removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from threadpoolctl import ThreadpoolController

from shoal.base import disk, seeding
from shoal.errors import DiskFault, UsageError

BLOCK = 1 << 16
"""Numbers that are drawn together. Part of every table: changing it changes all of them."""

_COLUMNS = 1 << 13  # of a weighted sum at once, so that a block of rows stays in the processor's cache
_ROWS = 16


@functools.lru_cache(maxsize=2)  # a worker may serve several runs
def table(seed: int, size: int) -> np.ndarray:
    """The table (size,) float32, read-only, mapped from this machine's file; made first if it is not there yet."""
    folder = _folder()
    path = folder / f"noise-{_digest(seed, size)}"
    try:
        with _locked(folder / "lock"):
            file = _open(path, seed, size)
            if file is None:
                _remove_unused(folder)
                _make(path, seed, size)
                file = os.open(path, os.O_RDONLY)
                fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        why = "there is no room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else error.strerror
        raise DiskFault(
            f"the noise table of {4 * size / 2**20:,.0f} MB could not be made in {folder}: {why}. Make room, name "
            f"another folder in the variable TMPDIR, or use a smaller table: --table-size {size // 4}"
        ) from None
    # All of it now, where the system can: a page that has to be read from disk later holds a lane up for milliseconds.
    mapped = mmap.mmap(file, 4 * size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), mmap.PROT_READ)
    os.close(file)  # the map has a copy of the descriptor, and with it the lock that says that the file is in use
    return np.frombuffer(mapped, np.float32)


def weighted_sum(table: np.ndarray, weights: np.ndarray, places: np.ndarray, size: int) -> np.ndarray:
    """Sum of weights[i] * table[places[i] : places[i] + size], (size,) float32: in this order, block by block.

    Rows are copied to a block that fits the cache and multiplied there, so each is read from memory once.
    """
    total = np.zeros(size, np.float32)
    starts = places.tolist()
    weights = weights.astype(np.float32)
    with _blas().limit(limits=1):  # more threads change bits
        for left in range(0, size, _COLUMNS):
            width = min(_COLUMNS, size - left)
            block = np.empty((_ROWS, width), np.float32)
            for top in range(0, len(starts), _ROWS):
                rows = starts[top : top + _ROWS]
                for row, start in enumerate(rows):
                    block[row] = table[start + left : start + left + width]
                total[left : left + width] += weights[top : top + len(rows)] @ block[: len(rows)]
    return total


@functools.cache
def _blas() -> ThreadpoolController:
    """NumPy's BLAS, found once: looking for it takes longer than the sum for a small policy."""
    return ThreadpoolController()


def _digest(seed: int, size: int) -> str:
    """What a table follows from; NumPy may change how it draws between versions."""
    return hashlib.sha256(f"{seed} {size} {BLOCK} {np.__version__}".encode()).hexdigest()[:16]


def _block(seed: int, number: int, size: int) -> np.ndarray:
    """Numbers of one block, the last of which may be shorter."""
    length = min(BLOCK, size - number * BLOCK)
    return seeding.rng(seed, "noise", number).standard_normal(BLOCK, dtype=np.float32)[:length]


def _folder() -> Path:
    """The folder of tables, which nobody else may write to: others could put numbers of their own there."""
    folder = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise DiskFault(
            f"the folder {folder} for noise tables cannot be made: {error.strerror}. "
            f"Name another temporary folder in the variable TMPDIR"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{folder} is not a folder of yours that only you can write to, so no noise table is read from it. "
            f"Remove it, or name another temporary folder in the variable TMPDIR"
        )
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time: the others wait for the table instead of making it too."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open(path: Path, seed: int, size: int) -> int | None:
    """The open file of a table, held; None if there is none, or if what is there is not the table."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(file, fcntl.LOCK_SH)
    last = (size - 1) // BLOCK
    whole = os.fstat(file).st_size == 4 * size and all(
        os.pread(file, 4 * BLOCK, 4 * BLOCK * number) == _block(seed, number, size).tobytes() for number in {0, last}
    )
    if whole:
        return file
    os.close(file)
    return None


def _make(path: Path, seed: int, size: int) -> None:
    with disk.replacing(path) as file:
        for number in range(-(-size // BLOCK)):
            file.write(_block(seed, number, size).tobytes())


def _remove_unused(folder: Path) -> None:
    """Remove tables that no process has mapped, and what crashes left behind."""
    disk.remove_leftovers(folder)
    for path in folder.glob("noise-*"):
        with path.open("rb") as file, contextlib.suppress(BlockingIOError):  # somebody uses it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
