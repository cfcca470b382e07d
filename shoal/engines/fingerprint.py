"""What has to be equal for two processes to compute the same bits, and a digest that shows whether they do."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from importlib import metadata
from pathlib import Path

import numpy as np

import shoal
from shoal.base.blas import one_thread

# The packages that compute what a task returns. Those that are not installed are left out.
_PACKAGES = ("numpy", "gymnasium", "box2d", "mujoco", "ale-py", "envpool", "open-spiel")


@functools.cache
def fingerprint() -> dict[str, str]:
    """This process: versions, Shoal's own code, and a digest of a little arithmetic."""
    versions = {"python": platform.python_version(), "shoal": shoal.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions | {"code": _code(), "canary": canary()}


def canary() -> str:
    """A digest of a few results that differ between CPU families and BLAS builds."""
    with one_thread():  # what counts is where tasks run, and there it is one
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


def _code() -> str:
    total = hashlib.sha256(sys.byteorder.encode())
    root = Path(shoal.__file__).parent
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def difference(head: dict[str, str], worker: dict[str, str]) -> str:
    """Both sides of what differs, or an empty string."""
    keys = [key for key in sorted(head | worker) if head.get(key) != worker.get(key)]
    return "; ".join(f"{key}: head {head.get(key, 'none')}, worker {worker.get(key, 'none')}" for key in keys)
