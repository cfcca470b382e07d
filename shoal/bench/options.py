"""Settings that parts share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shoal import bounds
from shoal.envs.make import check_id

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

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        found = bounds.problems(
            self,
            at_least_one=tuple(name for name in ("rounds", "seeds", "episodes") if hasattr(self, name)),
            above_zero=tuple(name for name in ("seconds", "cap") if hasattr(self, name)),
        )
        for env in getattr(self, "env", ()):
            found += check_id(env)
        return found


@dataclass(frozen=True)
class PeerOptions(Options):
    """Settings of every part that has peers."""

    peers: str = ""
    """Folder of the peers' virtualenv, made on first use; in the cache folder unless told."""

    @property
    def peers_folder(self) -> Path:
        """Where the peers are or will be."""
        return Path(self.peers or default_peers()).absolute()
