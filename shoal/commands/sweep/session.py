"""Train, prune and score the trials of a sweep, batch by batch.

Every decision is a function of the runs' metrics at fixed environment steps, taken in the order of the trials. So it
does not depend on workers or on the order of arrival, and a sweep that is run again takes the same decisions from the
files of its runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shoal.commands.campaign import findings, heads
from shoal.commands.campaign.findings import Finding
from shoal.commands.campaign.report import CampaignReport
from shoal.commands.campaign.runs import TASK, PlannedRun, other_settings, runs_at_once
from shoal.commands.sweep import results
from shoal.commands.sweep.ask import source_of
from shoal.commands.sweep.pruning import MedianRule
from shoal.commands.sweep.results import SeedResult, SweepResult, TrialRecord, TrialResult, trial_record
from shoal.commands.sweep.trials import Sweep, Trial
from shoal.engines.base import Engine
from shoal.errors import DiskFault, EnvironmentFault, RunBusy, TaskFailed, UsageError
from shoal.runs.folder import RunDir
from shoal.runs.metrics import MetricsRow
from shoal.sampling.tasks import describe


class SweepListener(heads.RunListener, Protocol):
    """Receives the progress of the runs and the results of the trials."""

    def say(self, text: str) -> None:
        """Print a line about a trial."""


@dataclass
class _Progress:
    """A trial of the current batch, as far as it has come."""

    trial: Trial
    returns: dict[int, float] = field(default_factory=dict)
    result: TrialResult | None = None


class SweepSession:
    """One sitting of a sweep, on an engine."""

    def __init__(self, sweep: Sweep, engine: Engine, listener: SweepListener) -> None:
        self.sweep, self.engine, self.listener = sweep, engine, listener
        self.findings: dict[int, list[Finding]] = {}
        self._rule = MedianRule()
        self._records: list[TrialRecord] = []
        self._before: list[TrialRecord] = []

    def run(self) -> SweepResult:
        """Run the sweep to its end, or raise `Stopped` once all runs are saved."""
        sweep = self.sweep
        if not set(TASK) & set(sweep.space):
            # An environment that cannot be made is refused here once, and not by every run.
            self.engine.submit(describe, sweep.base.settings.env_spec.to_record()).result()
        try:
            sweep.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskFault(f"{sweep.folder} cannot be created: {error.strerror}") from None
        with RunDir(sweep.folder).lock():
            self._before = results.read_records(sweep)
            self.listener.started(self._at_once(sweep.count * sweep.options.seeds), self.engine.workers)
            source, found = source_of(sweep), []
            while batch := source.ask():
                told = self._run_batch(batch)
                source.tell(told)
                found += told
            return SweepResult(sweep.folder, tuple(sorted(found, key=lambda result: result.rank)))

    def report(self, result: SweepResult) -> CampaignReport:
        """Make the table and the plot."""
        best = [
            finding for trial in result.trials[: results.PLOTTED] for finding in self.findings.get(trial.number, ())
        ]
        return results.make_report(self.sweep, result, best)

    def _at_once(self, runs: int) -> int:
        return runs_at_once(self.sweep.options.at_once, self.sweep.base.settings.engine, self.engine.workers, runs)

    # A batch ---------------------------------------------------------------------------------------------------

    def _run_batch(self, batch: Sequence[Trial]) -> list[TrialResult]:
        """Train a batch from rung to rung until each trial is finished, pruned or failed."""
        self._refuse_other_settings(batch)
        # Written before training: that a later batch was asked for makes the failures of earlier ones final.
        self._write([self._record_before(trial) for trial in batch])
        going = [_Progress(trial) for trial in batch]
        rung = every = self.sweep.options.prune_every
        for progress in going:
            if progress.trial.problems:
                self._fail(progress, f"these settings cannot be trained: {'; '.join(progress.trial.problems)}")
        while left := [progress for progress in going if progress.result is None]:
            self._train(left, rung)
            if rung is not None and every is not None:
                self._judge([progress for progress in left if progress.result is None], rung)
                rung += every
        told = [progress.result for progress in going if progress.result is not None]
        self._records += map(trial_record, told)
        self._write([])
        return told

    def _write(self, batch: list[TrialRecord]) -> None:
        records = [*self._records, *batch]
        later = self._before[len(records) :] if self.sweep.searched else []
        results.write_records(self.sweep, [*records, *later])

    def _record_before(self, trial: Trial) -> TrialRecord:
        """Return the record of a trial from an earlier sitting, or one without a result."""
        blank: TrialRecord = {"number": trial.number, "settings": _plain(trial.settings), "state": "unfinished"}
        same = [record for record in self._before if record["settings"] == blank["settings"]]
        return {**same[0], "number": trial.number} if same else blank

    def _refuse_other_settings(self, batch: Sequence[Trial]) -> None:
        differs = other_settings([run for trial in batch for run in trial.runs if not trial.problems])
        if differs and self._records:
            differs.append(
                "these runs do not have the settings that Optuna suggests after the earlier trials: their results or "
                "Optuna's version must have changed since"
            )
        if differs:
            raise UsageError(differs)

    def _train(self, left: Sequence[_Progress], rung: int | None) -> None:
        """Train trials to the next rung or their goal; settle those that finish or fail."""
        final = {progress.trial.number: self._final_failure(progress.trial, rung) for progress in left}
        runs = [run for progress in left if not final[progress.trial.number] for run in progress.trial.runs]
        failures: dict[PlannedRun, str] = {}
        if runs:
            failures = heads.train_all(runs, self.engine, self._at_once(len(runs)), self.listener, rung)
        if busy := [run for run in failures if run.folder.busy()]:
            raise RunBusy(f"{busy[0].folder.path} is being trained by another process: {failures[busy[0]]}")
        for progress in left:
            reasons = [f"{run.folder.name}: {failures[run]}" for run in progress.trial.runs if run in failures]
            reason = final[progress.trial.number] or "\n".join(reasons)
            if reason:
                self._fail(progress, reason)
            elif all(run.ends_before(rung) for run in progress.trial.runs):
                self._score(progress)
            elif not all(run.stands(rung) for run in progress.trial.runs):
                self._fail(progress, "its runs ended before their goal")

    def _final_failure(self, trial: Trial, rung: int | None) -> str:
        """Return why a trial failed in an earlier sitting, if suggestions were made since: these depend on it."""
        size = self.sweep.options.trial_batch
        last = min(len(self._records) // size * size + size, self.sweep.count)
        if not self.sweep.searched or len(self._before) <= last or all(run.stands(rung) for run in trial.runs):
            return ""
        before = self._before[trial.number]
        return before.get("reason", "") if before["state"] == "failed" else ""

    def _judge(self, left: Sequence[_Progress], rung: int) -> None:
        """Prune trials at a rung."""
        returns = [results.mean([_return_at(run, rung) for run in progress.trial.runs]) for progress in left]
        for progress, value, prune in zip(left, returns, self._rule.judge(rung, returns), strict=True):
            if value is not None:
                progress.returns[rung] = value
            if prune:
                median = self._rule.median(rung)
                reason = f"at {rung:,} steps, return {value:.6g} is below the median {median:.6g}"
                steps = max(_row_at(run, rung)["time/total_timesteps"] for run in progress.trial.runs)
                self._settle(progress, "pruned", None, (), steps, reason)

    def _score(self, progress: _Progress) -> None:
        """Score the runs of a trial that are finished."""
        found, runs = [], []
        for run in progress.trial.runs:
            try:
                finding, result = self._assess(run)
            except (EnvironmentFault, TaskFailed, UsageError) as error:
                self._fail(progress, f"{run.folder.name} could not be evaluated: {error}")
                return
            found.append(finding)
            runs.append(result)
        self.findings[progress.trial.number] = found
        score = results.mean([run.score for run in runs])
        steps = max(run.folder.metrics()[-1]["time/total_timesteps"] for run in progress.trial.runs)
        if score is None or not math.isfinite(score):
            self._fail(progress, f"its score is not a finite number ({score})")
        else:
            self._settle(progress, "finished", score, tuple(runs), steps, "")

    def _assess(self, run: PlannedRun) -> tuple[Finding, SeedResult]:
        """Score a run, unless an earlier sitting has scored the same policy."""
        rows = run.folder.metrics()
        name, seed, digest = run.folder.name, run.spec.settings.seed, rows[-1]["digest"]
        for record in self._before:
            for known in record.get("runs", ()):
                if (known["name"], known["digest"]) == (name, digest):
                    curve = findings.learning_curve(rows, run.spec.config.score_episodes)
                    return Finding(run, known["score"], curve), SeedResult(name, seed, known["score"], digest)
        finding = findings.assess_run(run, self.engine, self.sweep.options.final_episodes)
        return finding, SeedResult(name, seed, finding.score, digest)

    def _fail(self, progress: _Progress, reason: str) -> None:
        rows = [row for run in progress.trial.runs for row in run.folder.metrics()[-1:]]
        steps = max((row["time/total_timesteps"] for row in rows), default=0)
        self._settle(progress, "failed", None, (), steps, reason)

    def _settle(
        self,
        progress: _Progress,
        state: Literal["finished", "pruned", "failed"],
        score: float | None,
        runs: tuple[SeedResult, ...],
        steps: int,
        reason: str,
    ) -> None:
        trial = progress.trial
        progress.result = TrialResult(
            trial.number, trial.settings, state, score, runs, progress.returns, steps, reason
        )  # fmt: skip
        self.listener.say(f"trial {trial.label}: " + (f"score {score:.1f}" if reason == "" else f"{state}: {reason}"))


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they are in a JSON file."""
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _row_at(run: PlannedRun, rung: int) -> MetricsRow:
    """Return the row of a run at a rung, or its last one if it reached its goal before."""
    return run.row_at(rung) or run.folder.metrics()[-1]


def _return_at(run: PlannedRun, rung: int) -> float | None:
    """Return the mean return of a run at a rung, as in the learning curve; None before an episode has ended."""
    last = _row_at(run, rung)["iteration"]
    rows = [row for row in run.folder.metrics() if row["iteration"] <= last]
    value = float(findings.learning_curve(rows, run.spec.config.score_episodes)[-1, 2])
    return value if math.isfinite(value) else None
