"""The fingerprint: what has to be equal for two processes to compute the same bits."""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib import metadata
from pathlib import Path

import numpy as np

import shoal
from shoal.base.blas import one_thread

# Packages that compute the results of tasks. Those that are not installed are left out.
_PACKAGES = ("numpy", "gymnasium", "box2d", "mujoco", "ale-py", "envpool", "open-spiel")

PACKAGE = Path(shoal.__file__).parent

# The code that computes results on a worker: environments, policies and sampling, and the modules that they compute
# with. Other code (commands, reports, the engines' plumbing) decides where and when a task runs, not its result; a
# worker whose copy of that differs from the head's still computes the same bits.
RESULT_CODE = (
    "envs",
    "policies",
    "sampling",
    "base/blas.py",  # the number of BLAS threads changes bits
    "base/moments.py",
    "base/seeding.py",
    "base/trees.py",
    "engines/wire.py",  # head and worker must agree on the format
)


@functools.cache
def fingerprint() -> dict[str, str]:
    """Describe this process: versions, a digest of Shoal's code that computes results, and one of some arithmetic."""
    versions = {"python": platform.python_version(), "shoal": shoal.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions | {"code": code_digest(*RESULT_CODE), "canary": canary()}


def code_digest(*paths: str, root: Path = PACKAGE) -> str:
    """Digest source files of the package. Paths are relative to `root`; a folder stands for all .py files below it."""
    files: set[Path] = set()
    for path in paths:
        found = root / path
        files.update(found.rglob("*.py") if found.is_dir() else [found])
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(file.relative_to(root).as_posix().encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]


def canary() -> str:
    """Digest a few results that differ between CPU families, byte orders and BLAS builds."""
    with one_thread():  # as on workers
        return _canary()


def _canary() -> str:
    rng = np.random.Generator(np.random.Philox(key=2026))
    total = hashlib.sha256()
    for rows, inner, columns in ((1, 64, 64), (16, 17, 64), (300, 700, 500)):
        left = rng.standard_normal((rows, inner), dtype=np.float32)
        right = rng.standard_normal((inner, columns), dtype=np.float32)
        product = left @ right
        for array in (product, np.tanh(product), np.exp(product / inner), product.sum(axis=0)):
            total.update(array.tobytes())
    return total.hexdigest()[:12]


def difference(head: dict[str, str], worker: dict[str, str]) -> str:
    """List the entries that differ, with both values; empty if none do."""
    keys = [key for key in sorted(head | worker) if head.get(key) != worker.get(key)]
    return "; ".join(f"{key}: head {head.get(key, 'none')}, worker {worker.get(key, 'none')}" for key in keys)
