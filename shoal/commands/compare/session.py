"""Train the runs of a comparison on one engine, score their policies, and write the report."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shoal import engines
from shoal.commands.campaign import findings, heads
from shoal.commands.campaign.findings import Finding
from shoal.commands.campaign.report import CampaignReport
from shoal.commands.campaign.runs import PlannedRun, runs_at_once
from shoal.commands.compare.plan import Comparison
from shoal.sampling.tasks import describe


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison."""

    findings: list[Finding]
    """Of the runs that did not fail."""
    failures: dict[PlannedRun, str]
    """Why runs failed."""
    workers: int
    at_once: int
    """Runs that trained at the same time."""
    seconds: float
    """Duration of the training."""
    busy: float
    """Share of that time in which workers had a task."""


def train_and_score(wanted: Comparison, planned: list[PlannedRun], listener: heads.RunListener) -> ComparisonResult:
    """Train all runs to their goals, then play greedy episodes with their policies."""
    begun = time.monotonic()
    with engines.make(wanted.engine, wanted.workers) as engine:
        # An environment that cannot be made is refused here once, and not by every run.
        engine.submit(describe, planned[0].spec.settings.env_spec.to_record()).result()
        at_once = runs_at_once(wanted.at_once, wanted.engine, engine.workers, len(planned))
        listener.started(at_once, engine.workers)
        failures = heads.train_all(planned, engine, at_once, listener)
        seconds = time.monotonic() - begun
        busy = engine.telemetry().busy_seconds / (seconds * engine.workers)
        found = [findings.assess_run(run, engine, wanted.episodes) for run in planned if run not in failures]
        return ComparisonResult(found, failures, engine.workers, at_once, seconds, busy)


def make_report(wanted: Comparison, result: ComparisonResult) -> CampaignReport:
    """Make table.md and, if any episode ended, curves.svg."""
    env = result.findings[0].run.spec.settings.env_spec
    table = findings.tabulate(result.findings, wanted.threshold_on(env))
    note = (
        f"Score: mean return of {wanted.episodes} greedy episodes after training, mean over seeds. Along the way: mean "
        f"return of the last {findings.EPISODES} episodes in training (of the policy itself, for searches), by steps. "
        f"Seconds: of one run, with {result.at_once} at once on {result.workers} worker(s) and one machine; for the "
        f"time of a run alone use --at-once 1."
    )
    title = f"{env.id}: mean and range over {wanted.seeds} seeds" if wanted.seeds > 1 else env.id
    files = {wanted.folder / "table.md": f"# {env.id}\n\n{table}\n\n{note}\n\n![Learning curves](curves.svg)\n"}
    if any(len(finding.known) for finding in result.findings):
        files[wanted.folder / "curves.svg"] = findings.plot(title, result.findings)
    return CampaignReport(table, note, files)
