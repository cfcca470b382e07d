"""Settings that parts share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shoal.base import validation
from shoal.envs.make import env_problems

Say = Callable[[str], None]
"""Prints one line."""


def default_peers() -> str:
    """Where the peers' virtualenv is unless told."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "peers")


@dataclass(frozen=True)
class Options:
    """Settings of every part."""

    out: str | None = None
    """Page to write the table to; docs/benchmarks.md where there is one, unless quick."""
    quick: bool = False
    """Fewer and shorter rounds: minutes instead of an hour, and rough."""

    QUICK: ClassVar[dict[str, Any]] = {}
    """Other defaults when quick."""

    def environments(self) -> list[str]:
        """Which environments will be made."""
        return list(getattr(self, "env", ()))

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        found = validation.field_problems(
            self,
            at_least_one=tuple(name for name in ("rounds", "seeds") if hasattr(self, name)),
            above_zero=tuple(name for name in ("seconds", "cap") if hasattr(self, name)),
        )
        for env in self.environments():
            found += env_problems(env)
        return found + folder_problems(self.out)


def folder_problems(*files: str | None) -> list[str]:
    """Which of the files that shall be written have no folder; better said before an hour of measuring than after."""
    return [
        f"there is no folder {Path(file).parent} for {file}"
        for file in files
        if file and not Path(file).parent.is_dir()
    ]


@dataclass(frozen=True)
class PeerOptions(Options):
    """Settings of every part that has peers."""

    peers: str = ""
    """Folder of the peers' virtualenv, made on first use; in the cache folder unless told."""

    @property
    def peers_folder(self) -> Path:
        """Where the peers are or will be."""
        return Path(self.peers or default_peers()).absolute()
