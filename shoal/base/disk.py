"""Atomic, durable writes: a crash at any moment leaves either the old or the new content, never a mix.

Every write goes to a temporary name, is synced and renamed, and then the folder is synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp-"
"""Prefix of temporary names. Unless a process holds the run, files with this prefix are leftovers of a crash."""


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file to write to, and rename it to `path` at the end of the block."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Create a folder with these files, replacing an existing one."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for name, content in files.items():
            _write(temporary / name, content)
        _sync_folder(temporary)
        if path.exists():
            remove_folder(path)
        temporary.rename(path)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder; after a crash it is either complete or gone from `path`, never partial."""
    aside = path.with_name(f"{TEMPORARY}gone-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders that crashes left behind."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
