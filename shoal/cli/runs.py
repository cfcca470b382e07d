"""The command `runs`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.console import console, print_table, say
from shoal.cli.parsing import parse
from shoal.errors import CheckpointFault

if TYPE_CHECKING:
    from shoal.runs.folder import RunDir


@dataclass(frozen=True)
class RunsArgs:
    """List the runs in a folder, newest last."""

    runs: str = "runs"
    """Folder of all runs."""


def list_runs(words: list[str]) -> int:
    """Print a table of all runs."""
    wanted = parse(RunsArgs, words, "runs")
    from shoal.runs.folder import RunDir

    out = console()
    found = RunDir.all(Path(wanted.runs))
    if not found:
        say(out, f"There are no runs in {wanted.runs}. To start one, run: shoal train trpo CartPole-v1")
        return 0
    rows = [
        ["run", "algorithm", "environment", "seed", "iteration", "steps", "return", "state"],
        *map(_row, found),
    ]
    print_table(out, rows)
    return 0


def _row(run: RunDir) -> list[str]:
    from shoal.runs.settings import Settings

    try:
        record, rows = run.record(), run.metrics()
    except (CheckpointFault, OSError) as error:
        return [run.name, *[""] * 6, f"unreadable: {error}"]
    settings = Settings(**record["settings"])
    last = rows[-1] if rows else None
    score = None if last is None else last.get("rollout/ep_rew_mean")
    finished = last is not None and settings.goal.reached(last)
    return [
        run.name,
        record["algo"],
        settings.env,
        str(settings.seed),
        "0" if last is None else str(last["iteration"]),
        "0" if last is None else f"{last['time/total_timesteps']:,}",
        "" if score is None else f"{score:.1f}",
        "running" if run.busy() else "finished" if finished else "stopped",
    ]
