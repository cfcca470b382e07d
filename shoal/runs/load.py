"""Load a policy to act with. Imports little, because programs that only act start with this."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from shoal.policies.loaded import LoadedPolicy
from shoal.runs.folder import policy_file


class HasFolder(Protocol):
    """A run, or anything else that has a folder."""

    @property
    def path(self) -> Path: ...


def load(source: str | Path | HasFolder, *, runs: str | Path = "runs") -> LoadedPolicy:
    """Load a trained policy: of a run, also by name or folder; of a checkpoint's folder; or from a policy file.

    Needs no JAX, and imports nothing that the file names.
    """
    place = source if isinstance(source, str | Path) else source.path
    return LoadedPolicy.load(policy_file(str(place), Path(runs)))
