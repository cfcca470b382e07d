"""What the console shows while a sweep runs."""

from __future__ import annotations

from rich.console import Console

from shoal.commands.campaign.progress import ProgressPrinter
from shoal.commands.sweep.ask import source_of
from shoal.commands.sweep.results import read_records
from shoal.commands.sweep.trials import Sweep


def printer_of(out: Console, sweep: Sweep) -> ProgressPrinter:
    """Make the printer of a sweep's progress."""
    settings, options = sweep.base.settings, sweep.options
    total = sweep.count * options.seeds

    def header(at_once: int, workers: int) -> str:
        trials = f"{sweep.count} trials" + (f" x {options.seeds} seeds" if options.seeds > 1 else "")
        return (
            f"{trials} of {settings.goal} on {settings.env}, {at_once} runs at once on {workers} worker(s); in "
            f"{sweep.folder}"
        )

    return ProgressPrinter(out, header, total, _done(sweep))


def _done(sweep: Sweep) -> int:
    """Count the runs that are finished already."""
    if sweep.searched:
        return sum(len(record.get("runs", ())) for record in read_records(sweep))
    return sum(run.finished for trial in source_of(sweep).ask() for run in trial.runs)
