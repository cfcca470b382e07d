"""The command `compare`: several algorithms and seeds on one task, at the same time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shoal.base import signals
from shoal.cli.console import console, say
from shoal.cli.parsing import parse
from shoal.errors import Stopped

if TYPE_CHECKING:
    from shoal.commands.compare.plan import ComparedRun, Comparison


def compare(words: list[str]) -> int:
    """Train all runs and print their results; the exit code is 1 if a run failed."""
    from shoal.commands.compare import session
    from shoal.commands.compare.plan import Comparison, plan_runs

    wanted = parse(Comparison, words, "compare")
    out = console()
    planned = plan_runs(wanted)
    session.refuse_mpi_outside_a_job(wanted)
    try:
        with signals.listening():
            return _compare(out, wanted, planned)
    except Stopped as stop:
        say(out, f"{stop}: all runs are saved in {wanted.folder}. To continue them, run the same command again")
        return 128 + stop.number


def _compare(out: Console, wanted: Comparison, planned: list[ComparedRun]) -> int:
    from shoal.commands.compare import session

    with _ProgressPrinter(out, wanted, planned) as printer:
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


class _ProgressPrinter:
    """Shows a live line for each run on a terminal, and prints a line when a run ends."""

    def __init__(self, out: Console, wanted: Comparison, planned: list[ComparedRun]) -> None:
        self._out, self._wanted, self._planned = out, wanted, planned
        self._done = sum(run.finished for run in planned)
        self._lock = threading.Lock()
        self._begun: dict[ComparedRun, float] = {}
        self._tasks: dict[ComparedRun, TaskID] = {}
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            console=out,
            disable=not out.is_terminal or out.is_dumb_terminal,
            transient=True,
        )

    def __enter__(self) -> _ProgressPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, at_once: int, workers: int) -> None:
        from shoal.commands.compare.plan import tuning_warning

        settings = self._planned[0].spec.settings
        say(
            self._out,
            f"{len(self._planned)} runs of {settings.steps:,} steps on {settings.env}, {at_once} at once on {workers} "
            f"worker(s); in {self._wanted.folder}",
        )
        if warning := tuning_warning(self._planned):
            say(self._out, warning)
        self._progress.start()
        if self._done:
            say(self._out, f"{self._done} of {len(self._planned)} are done already")

    def began(self, run: ComparedRun) -> None:
        with self._lock:
            self._begun[run] = time.monotonic()
            self._tasks[run] = self._progress.add_task(str(run), total=run.spec.settings.steps, numbers="starting")

    def progress(self, run: ComparedRun, steps: int, score: float | None) -> None:
        numbers = f"{steps:,} steps" + ("" if score is None else f", return {score:.1f}")
        self._progress.update(self._tasks[run], completed=steps, numbers=numbers)

    def printed(self, run: ComparedRun, text: str) -> None:
        say(self._out, f"{run}: {text}")

    def ended(self, run: ComparedRun, failure: str) -> None:
        with self._lock:
            self._done += not failure
            self._progress.remove_task(self._tasks.pop(run))
            seconds = time.monotonic() - self._begun[run]
            if failure:
                say(self._out, f"{run} failed after {seconds:.1f} s: {failure}")
                return
            last = run.folder.metrics()[-1]
            score = last.get("rollout/ep_rew_mean")
            say(
                self._out,
                f"{run}: {last['time/total_timesteps']:,} steps in {seconds:.1f} s"
                + ("" if score is None else f", return {score:.1f}")
                + f"; digest {last['digest']} ({self._done} of {len(self._planned)})",
            )
