"""Options that the parts share, and what `shoal bench` needs from a part."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from shoal.base import validation
from shoal.envs.names import env_problems

Say = Callable[[str], None]
"""Prints one line."""


def default_peers() -> str:
    """Return the default folder of the peers' virtualenv, in the user's cache."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "peers")


@dataclass(frozen=True)
class BenchOptions:
    """Options of every part."""

    out: str | None = None
    """Page to write the table to (default: docs/benchmarks.md if that file exists; none with --quick)."""
    quick: bool = False
    """Fewer and shorter rounds: minutes instead of an hour, with rough figures."""

    QUICK: ClassVar[dict[str, Any]] = {}
    """Defaults that --quick replaces."""

    def environments(self) -> list[str]:
        """List the environments of a part; each is created once before anything is measured."""
        return []

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        names = {field.name for field in fields(self)}
        found = validation.field_problems(
            self, at_least_one=sorted(names & {"rounds", "seeds"}), above_zero=sorted(names & {"seconds", "cap"})
        )
        for env in self.environments():
            found += env_problems(env)
        return found + folder_problems(self.out)


def folder_problems(*files: str | None) -> list[str]:
    """Name the output files whose folder does not exist: better known before an hour of measuring than after it."""
    return [
        f"there is no folder {Path(file).parent} for {file}"
        for file in files
        if file and not Path(file).parent.is_dir()
    ]


@dataclass(frozen=True)
class PeerOptions(BenchOptions):
    """Options of every part that measures peers."""

    peers: str = ""
    """Folder of the peers' virtualenv, created on first use (default: ~/.cache/shoal/peers)."""

    @property
    def peers_folder(self) -> Path:
        """The folder of the peers' virtualenv, as an absolute path."""
        return Path(self.peers or default_peers()).absolute()
