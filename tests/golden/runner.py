"""Run the golden cases with whichever `shoal` is first on the path, and print their digests as JSON.

A program of its own, so that it can be run on the code of another commit; it uses Shoal's command line alone.

    PYTHONPATH=TREE python -m tests.golden.runner
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from tests.golden.cases import COMMON, FIXTURES, TRAIN

THREADS = 1
SAVED = Path(__file__).parent / "saved"
_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "scipy", "gymnasium", "envpool", "nevergrad", "cma")


def key() -> str:
    """What the digests of a machine depend on besides Shoal: library versions, arithmetic and learner threads."""
    versions = " ".join(f"{name}-{metadata.version(name)}" for name in _PACKAGES)
    return f"{versions} canary-{_canary()} threads-{THREADS}"


def _canary() -> str:
    """A digest of a little arithmetic in NumPy and in XLA, which both compute other bits on other CPUs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.Generator(np.random.Philox(key=2026))
    left, right = (rng.standard_normal(shape, dtype=np.float32) for shape in ((40, 70), (70, 64)))
    angles = rng.standard_normal(1000)
    mine = [left @ right, np.tanh(left), np.exp(left), left.sum(axis=0), np.sin(angles), np.cos(angles), np.exp(angles)]

    def loss(weights: jax.Array) -> jax.Array:
        return (jnp.tanh(left @ weights) ** 2).mean() + jax.nn.log_softmax(left @ weights).mean()

    theirs = jax.jit(jax.value_and_grad(loss))(right)
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in [*mine, *theirs])).hexdigest()[:12]


def shoal(words: list[str]) -> None:
    """Run one `shoal` command in this process, without its output."""
    from shoal.cli import main

    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main(words)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"shoal {' '.join(words)} ended with {end.code}:\n{output.getvalue()}") from None


def digests(run: Path) -> list[str]:
    """The digest of each iteration of a run."""
    return [json.loads(line)["digest"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_all(runs: Path) -> dict[str, list[str]]:
    """The digests of every case, by its name; `runs` is an empty folder to work in."""
    found = {}
    for number, (name, words) in enumerate(TRAIN.items()):
        shoal(["train", *words.split(), *COMMON.split(), "--name", f"case-{number}", "--runs", str(runs)])
        found[name] = digests(runs / f"case-{number}")
    for algo in FIXTURES:
        shutil.copytree(SAVED / algo, runs / algo)
        try:
            shoal(["resume", algo, "--iterations", "4", "--engine", "serial", "--runs", str(runs)])
        except RuntimeError as error:  # CMA replays its history bit for bit, which a CPU of another kind cannot
            if "proposed different weights" not in str(error):
                raise
        found[f"resume {algo}"] = digests(runs / algo)
    return found


if __name__ == "__main__":
    os.environ["NPROC"] = str(THREADS)
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = run_all(Path(folder))
    json.dump({"key": key(), "digests": result}, sys.stdout)
