"""The command `evaluate`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from shoal.cli.console import console, say
from shoal.cli.parsing import parse


@dataclass(frozen=True)
class EvaluateArgs:
    """Play whole episodes with the newest policy of a run, or with a policy file."""

    run: tyro.conf.Positional[str]
    """Name of the run, path of its folder, or a .safetensors file."""
    episodes: int = 100
    """Number of episodes."""
    seed: int = 0
    """Seed of the episodes."""
    sample: bool = False
    """Sample actions as in training, instead of taking the most likely ones."""
    engine: str = "processes"
    """What runs the environments: serial, processes, mpi, ray or redis. Does not change the result."""
    workers: int | None = None
    """Number of workers (default: one per core). Does not change the result."""
    runs: str = "runs"
    """Folder of all runs."""
    allow: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Module to import for a run of another user or a policy file without a run; may be repeated (default: none)."""
    json: bool = False
    """Print the result as one line of JSON."""


def evaluate(words: list[str]) -> int:
    """Play episodes and print their mean return."""
    wanted = parse(EvaluateArgs, words, "evaluate")
    from shoal.commands.evaluate import evaluate_run

    out = console()
    begun = time.monotonic()
    found = evaluate_run(
        wanted.run, Path(wanted.runs), count=wanted.episodes, seed=wanted.seed, sample=wanted.sample,
        engine=wanted.engine, workers=wanted.workers, allow=wanted.allow,
    )  # fmt: skip
    summary = {
        "episodes": len(found.returns),
        "mean": float(found.returns.mean()),
        "std": float(found.returns.std()),
        "min": float(found.returns.min()),
        "max": float(found.returns.max()),
        "mean_length": float(found.lengths.mean()),
    }
    if wanted.json:
        print(json.dumps(summary))
        return 0
    say(
        out,
        f"{summary['episodes']} episodes in {time.monotonic() - begun:.1f} s: return {summary['mean']:.1f} ± "
        f"{summary['std']:.1f} (from {summary['min']:.1f} to {summary['max']:.1f}), "
        f"length {summary['mean_length']:.0f}",
    )
    if found.vector:
        say(out, f"The policy was trained with --vector {found.vector}; these episodes ran in Gymnasium's environment")
    return 0
