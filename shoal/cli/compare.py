"""The command `compare`: several algorithms and seeds on one task, at the same time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from rich.console import Console

from shoal.base import signals
from shoal.cli.console import console, say
from shoal.cli.parsing import parse
from shoal.errors import Stopped

if TYPE_CHECKING:
    from shoal.commands.campaign.runs import PlannedRun
    from shoal.commands.compare.plan import Comparison


def compare(words: list[str]) -> int:
    """Train all runs and print their results; the exit code is 1 if a run failed."""
    from shoal.commands.campaign.heads import refuse_mpi_outside_a_job
    from shoal.commands.compare.plan import Comparison, plan_runs

    wanted = parse(Comparison, words, "compare")
    out = console()
    planned = plan_runs(wanted)
    refuse_mpi_outside_a_job("compare", wanted.engine, wanted.workers)
    try:
        with signals.listening():
            return _compare(out, wanted, planned)
    except Stopped as stop:
        say(out, f"{stop}: all runs are saved in {wanted.folder}. To continue them, run the same command again")
        return 128 + stop.number


def _compare(out: Console, wanted: Comparison, planned: list[PlannedRun]) -> int:
    from shoal.commands.campaign.progress import ProgressPrinter
    from shoal.commands.compare import session

    header = functools.partial(_header, wanted, planned)
    with ProgressPrinter(out, header, len(planned), sum(run.finished for run in planned)) as printer:
        result = session.train_and_score(wanted, planned, printer)
    if not result.findings:
        say(out, "All runs failed. Fix the errors above and run the same command again")
        return 1
    report = session.make_report(wanted, result)
    say(out, f"\n{report.table}\n\n{report.note}\n")
    report.write()
    say(out, f"Saved:   {', '.join(map(str, report.files))}")
    say(out, f"Time:    {result.seconds:.1f} s for {len(planned)} runs; workers were busy {result.busy:.0%} of it")
    say(out, f"Runs:    shoal runs --runs {wanted.folder}")
    if result.failures:
        failed = ", ".join(map(str, result.failures))
        say(out, f"Failed:  {failed}. To try them again, run the same command again")
    return 1 if result.failures else 0


def _header(wanted: Comparison, planned: list[PlannedRun], at_once: int, workers: int) -> str:
    from shoal.commands.compare.plan import tuning_warning

    settings = planned[0].spec.settings
    line = (
        f"{len(planned)} runs of {settings.steps:,} steps on {settings.env}, {at_once} at once on {workers} "
        f"worker(s); in {wanted.folder}"
    )
    warning = tuning_warning(planned)
    return f"{line}\n{warning}" if warning else line
