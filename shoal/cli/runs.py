"""Commands that look at runs: evaluate, runs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from shoal.cli.parsing import console, parse, say
from shoal.errors import CheckpointFault

if TYPE_CHECKING:
    from shoal.rundir import RunDir


@dataclass(frozen=True)
class Evaluate:
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
    wanted = parse(Evaluate, words, "evaluate")
    from shoal.evaluate import evaluate as play

    out = console()
    begun = time.monotonic()
    scores = play(
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
    return 0


@dataclass(frozen=True)
class Runs:
    """List the runs in a folder, newest last."""

    runs: str = "runs"
    """Folder of all runs."""


def list_runs(words: list[str]) -> int:
    """List runs."""
    wanted = parse(Runs, words, "runs")
    from shoal.rundir import RunDir

    out = console()
    found = RunDir.all(Path(wanted.runs))
    if not found:
        say(out, f"There are no runs in {wanted.runs}. To make one, type: shoal train trpo CartPole-v1")
        return 0
    rows = [
        ["run", "algorithm", "environment", "seed", "iteration", "steps", "return", "state"],
        *map(_row, found),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say(out, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(run: RunDir) -> list[str]:
    from shoal.run import Settings

    try:
        record, lines = run.config(), run.metrics()
    except (CheckpointFault, OSError) as error:
        return [run.name, *[""] * 6, f"unreadable: {error}"]
    settings = Settings(**record["settings"])
    last = lines[-1] if lines else {"iteration": 0, "time/total_timesteps": 0}
    finished = settings.goal.reached(last["iteration"], last) >= 1
    score = last.get("rollout/ep_rew_mean")
    return [
        run.name,
        record["algo"],
        settings.env,
        str(settings.seed),
        str(last["iteration"]),
        f"{last['time/total_timesteps']:,}",
        "" if score is None else f"{score:.1f}",
        "running" if run.busy() else "finished" if finished else "stopped",
    ]
