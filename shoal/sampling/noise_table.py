"""A table of normal noise that all processes of a machine share, so that a direction is one integer: an offset in it.

The table follows from its seed and size alone. It is a file in the machine's temporary folder, written once by the
first process that needs it and mapped read-only by all, so it takes memory once for any number of workers. It stays for
the next run; when another table is made, those that no process has mapped are removed.
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
def open_table(seed: int, size: int) -> np.ndarray:
    """Map the table (size,) float32 read-only from this machine's file, which is written first if it does not exist."""
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
        why = "no space is left" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else error.strerror
        raise DiskFault(
            f"the noise table of {4 * size / 2**20:,.0f} MB could not be written to {folder}: {why}. Free some space, "
            f"set TMPDIR to another folder, or use a smaller table: --table-size {size // 4}"
        ) from None
    # Populated now, where the system can: a page that is read from disk later delays a lane by milliseconds.
    mapped = mmap.mmap(file, 4 * size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), mmap.PROT_READ)
    os.close(file)  # the map keeps a copy of the descriptor, and with it the lock that marks the file as used
    return np.frombuffer(mapped, np.float32)


def weighted_sum(table: np.ndarray, weights: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
    """Sum weights[i] * table[offsets[i] : offsets[i] + size] to (size,) float32, in this order, block by block.

    Rows are copied to a block that fits the cache and multiplied there, so each is read from memory once.
    """
    total = np.zeros(size, np.float32)
    starts = offsets.tolist()
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
    """Find NumPy's BLAS once: searching for it takes longer than the sum for a small policy."""
    return ThreadpoolController()


def _digest(seed: int, size: int) -> str:
    """Hash what a table depends on; NumPy may change its draws between versions."""
    return hashlib.sha256(f"{seed} {size} {BLOCK} {np.__version__}".encode()).hexdigest()[:16]


def _block(seed: int, number: int, size: int) -> np.ndarray:
    """Draw one block of the table; the last one may be shorter."""
    length = min(BLOCK, size - number * BLOCK)
    return seeding.rng(seed, "noise", number).standard_normal(BLOCK, dtype=np.float32)[:length]


def _folder() -> Path:
    """Return the folder of tables. Only this user may write to it, or other users could plant their numbers there."""
    folder = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise DiskFault(
            f"the folder {folder} for noise tables cannot be created: {error.strerror}. "
            f"Set TMPDIR to another temporary folder"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{folder} is not a folder that only you can write to, so no noise table is read from it. "
            f"Remove it, or set TMPDIR to another temporary folder"
        )
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time make the table; the others wait for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open(path: Path, seed: int, size: int) -> int | None:
    """Open and lock the file of a table; None if it does not exist or has other content."""
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
    """Remove tables that no process has mapped, and leftovers of crashes."""
    disk.remove_leftovers(folder)
    for path in folder.glob("noise-*"):
        with path.open("rb") as file, contextlib.suppress(BlockingIOError):  # in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
