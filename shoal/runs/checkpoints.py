"""Checkpoints on disk: the arrays of a state as safetensors, everything else in a manifest with checksums."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import safetensors.numpy

from shoal.base import disk
from shoal.base.trees import Tree, flatten, unflatten

_FORMAT = "shoal-checkpoint-1"
POLICY = "policy.safetensors"
"""Name of the policy file, in a run's folder and in each checkpoint."""


class Checkpoint(NamedTuple):
    """A state from which training continues. Iteration 0 has no state: training starts."""

    iteration: int
    state: Tree | None


class Manifest(TypedDict):
    """The content of a checkpoint's manifest.json."""

    format: str
    iteration: int
    plain: dict[str, Any]
    """Leaves of the state that are not arrays, by path."""
    bytes: int
    """Size of state.safetensors."""
    sha256: str
    """Of state.safetensors."""
    manifest_sha256: NotRequired[str]
    """Of everything above, as JSON."""


def write_checkpoint(folder: Path, iteration: int, state: Tree, policy: bytes) -> None:
    """Write a checkpoint and the policy of that iteration, atomically and durably."""
    table = flatten(state)
    arrays = {path: np.asarray(leaf, order="C") for path, leaf in table.items() if isinstance(leaf, np.ndarray)}
    blob = safetensors.numpy.save(arrays)
    manifest: Manifest = {
        "format": _FORMAT,
        "iteration": iteration,
        "plain": {path: leaf for path, leaf in table.items() if not isinstance(leaf, np.ndarray)},
        "bytes": len(blob),
        "sha256": hashlib.sha256(blob).hexdigest(),
    }
    manifest["manifest_sha256"] = _manifest_hash(manifest)
    files = {"state.safetensors": blob, POLICY: policy, "manifest.json": json.dumps(manifest).encode()}
    disk.write_folder(folder, files)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint; raise if any byte of it is damaged."""
    manifest: Manifest = json.loads((folder / "manifest.json").read_bytes())
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}, but this version reads {_FORMAT!r}")
    if manifest["manifest_sha256"] != _manifest_hash(manifest):
        raise ValueError("its manifest is damaged (sha256 differs)")
    blob = (folder / "state.safetensors").read_bytes()
    if len(blob) != manifest["bytes"]:
        raise ValueError(f"state.safetensors has {len(blob):,} bytes instead of {manifest['bytes']:,}")
    if hashlib.sha256(blob).hexdigest() != manifest["sha256"]:
        raise ValueError("state.safetensors is damaged (sha256 differs)")
    return Checkpoint(manifest["iteration"], unflatten(manifest["plain"] | safetensors.numpy.load(blob)))


def _manifest_hash(manifest: Manifest) -> str:
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
