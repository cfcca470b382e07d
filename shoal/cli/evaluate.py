"""The command `evaluate`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from shoal.cli.parsing import console, parse, say

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class EvaluateArgs:
    """Play whole episodes with the newest policy of a run, or with a policy file."""

    run: tyro.conf.Positional[str]
    """Name of the run, path of its folder, or a .safetensors file."""
    episodes: int = 100
    """How many episodes."""
    seed: int = 0
    """Which episodes."""
    sample: bool = False
    """Draw actions as in training, instead of taking the likeliest."""
    engine: str = "processes"
    """Who runs the environments."""
    workers: int | None = None
    """How many workers."""
    runs: str = "runs"
    """Folder of all runs."""
    json: bool = False
    """Print one line of JSON."""


def evaluate(words: list[str]) -> int:
    """Play episodes."""
    wanted = parse(EvaluateArgs, words, "evaluate")
    from shoal.commands.evaluate import evaluate_run

    out = console()
    begun = time.monotonic()
    scores = evaluate_run(
        wanted.run, Path(wanted.runs), count=wanted.episodes, seed=wanted.seed, sample=wanted.sample,
        engine=wanted.engine, workers=wanted.workers,
    )  # fmt: skip
    summary = {
        "episodes": len(scores.returns),
        "mean": float(scores.returns.mean()),
        "std": float(scores.returns.std()),
        "min": float(scores.returns.min()),
        "max": float(scores.returns.max()),
        "mean_length": float(scores.lengths.mean()),
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
    if scores.vector:
        say(out, f"It was learned in the environment of --vector {scores.vector}; this was Gymnasium's own")
    return 0
