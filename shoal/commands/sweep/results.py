"""The results of a sweep: of each trial, as JSON, as a table and as a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from shoal.base import disk
from shoal.commands.campaign import findings
from shoal.commands.campaign.findings import Finding
from shoal.commands.campaign.report import CampaignReport
from shoal.commands.sweep.space import flag_of, text_of
from shoal.commands.sweep.trials import Sweep
from shoal.errors import DiskFault, UsageError
from shoal.reports.tables import interquartile_mean, markdown_table

PLOTTED = 8
"""Trials in the plot: more lines could not be told apart."""


@dataclass(frozen=True)
class SeedResult:
    """The result of one run of a trial."""

    name: str
    """Name of the run, in the folder of the sweep."""
    seed: int
    score: float
    """Mean return of greedy episodes with the final policy."""
    digest: str
    """Digest of everything the run has learned."""


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial of a sweep."""

    number: int
    settings: dict[str, Any]
    """The swept settings."""
    state: Literal["finished", "pruned", "failed"]
    score: float | None
    """Mean of the scores of its runs; None unless finished."""
    runs: tuple[SeedResult, ...]
    """Its runs, one for each seed; empty unless finished."""
    returns: dict[int, float]
    """Mean return at each number of environment steps at which the trial was judged."""
    steps: int
    """Environment steps of its longest run, up to where it was pruned."""
    reason: str
    """Why it was pruned or failed; empty otherwise."""

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, best first: finished trials by score, then pruned ones by how far they came, then failed ones."""
        order = ("finished", "pruned", "failed").index(self.state)
        score = self.score if self.score is not None else list(self.returns.values())[-1] if self.returns else 0.0
        return (order, -self.steps if self.state == "pruned" else 0, -score, self.number)


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep."""

    path: Path
    """Folder of the runs, trials.json, table.md and curves.svg."""
    trials: tuple[TrialResult, ...]
    """All trials, the best first."""

    @property
    def best(self) -> TrialResult | None:
        """The finished trial with the highest score; None if no trial has finished."""
        return self.trials[0] if self.trials and self.trials[0].state == "finished" else None


class TrialRecord(TypedDict):
    """One trial in trials.json: the fields of `TrialResult`, or only these two until it has a result."""

    number: int
    settings: dict[str, Any]
    state: str
    score: NotRequired[float | None]
    runs: NotRequired[list[dict[str, Any]]]
    returns: NotRequired[dict[str, float]]
    steps: NotRequired[int]
    reason: NotRequired[str]


class SweepRecord(TypedDict):
    """The content of trials.json. It has no times and no number of workers, so equal sweeps have equal files."""

    algo: str
    env: str
    sweep: dict[str, Any]
    """What is varied, and whatever else the suggestions of a search depend on."""
    trials: list[TrialRecord]


def trial_record(result: TrialResult) -> TrialRecord:
    """Describe the result of a trial."""
    record: TrialRecord = json.loads(json.dumps(asdict(result)))
    return record


def records_file(sweep: Sweep) -> Path:
    """Locate the file of all results."""
    return sweep.folder / "trials.json"


def read_records(sweep: Sweep) -> list[TrialRecord]:
    """Read the results of earlier sittings; refuses those of a different search in the same folder."""
    path = records_file(sweep)
    try:
        record: SweepRecord = json.loads(path.read_bytes())
        then, trials = record["sweep"], record["trials"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Restore it, or use another --name to start again") from None
    now = sweep.identity()
    if "search" not in then and "search" not in now:
        return trials
    differs = [
        f"{key} {then.get(key)} then, {now.get(key)} now" for key in sorted(then | now) if then.get(key) != now.get(key)
    ]
    if differs:
        raise UsageError(
            f"{sweep.folder} holds another sweep ({'; '.join(differs)}), and later suggestions depend on that. Use the "
            f"same settings to continue, or another --name to start again"
        )
    if len(trials) > sweep.count:
        raise UsageError(f"{sweep.folder} holds {len(trials)} trials already: --trials must be at least {len(trials)}")
    return trials


def write_records(sweep: Sweep, trials: Sequence[TrialRecord]) -> None:
    """Write trials.json."""
    settings = sweep.base.settings
    record: SweepRecord = {
        "algo": sweep.base.algo, "env": settings.env, "sweep": sweep.identity(), "trials": list(trials),
    }  # fmt: skip
    path = records_file(sweep)
    try:
        disk.write_file(path, (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise DiskFault(f"{path} could not be written: {error.strerror}") from None


# The table and the plot ------------------------------------------------------------------------------------------


def tabulate(sweep: Sweep, trials: Sequence[TrialResult]) -> str:
    """Make a table with a row for each trial, in this order."""
    header = ["trial", *map(flag_of, sweep.space), "score", "lowest to highest", "interquartile mean", "steps", "state"]
    return markdown_table(header, [_row(trial) for trial in trials])


def _row(trial: TrialResult) -> list[str]:
    row = [str(trial.number), *map(text_of, trial.settings.values())]
    scores = [run.score for run in trial.runs]
    if trial.score is None:
        row += ["", "", ""]
    else:
        row += [f"{trial.score:.1f}", f"{min(scores):.1f} to {max(scores):.1f}", f"{interquartile_mean(scores):.1f}"]
    state: str = trial.state
    if trial.state == "pruned":
        state = f"pruned, return {list(trial.returns.values())[-1]:.1f}"
    return [*row, f"{trial.steps:,}", state]


def make_report(sweep: Sweep, result: SweepResult, found: Sequence[Finding]) -> CampaignReport:
    """Make table.md and, if any episode of the best trials ended, curves.svg. `found` are their runs, best first."""
    settings, options = sweep.base.settings, sweep.options
    table = tabulate(sweep, result.trials)
    finished = sum(trial.state == "finished" for trial in result.trials)
    note = (
        f"Score: mean return of {options.final_episodes} greedy episodes after training, mean over {options.seeds} "
        f"seed(s)."
    )
    if options.prune_every is not None:
        note += (
            f" Pruned: the mean return was below the median of the trials that had reached the same number of steps, a "
            f"multiple of {options.prune_every:,}."
        )
    drawn = any(len(finding.known) for finding in found)
    if drawn and finished > PLOTTED:
        note += f" The plot shows the best {PLOTTED} of {finished} finished trials."
    content = f"# {settings.env}\n\n{table}\n\n{note}\n"
    files = {}
    if drawn:
        title = f"{settings.env}: best {min(PLOTTED, finished)} of {len(result.trials)} trials"
        files[sweep.folder / "curves.svg"] = findings.plot(title, found)
        content += "\n![Learning curves](curves.svg)\n"
    return CampaignReport(table, note, {sweep.folder / "table.md": content, **files})


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of numbers, or None if one is missing."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
