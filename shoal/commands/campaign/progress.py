"""What the console shows while the runs of a campaign train."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shoal.commands.campaign.runs import PlannedRun


class ProgressPrinter:
    """Shows a live line for each run on a terminal, and prints a line when a run ends or pauses.

    `header` makes the first lines from the number of runs at once and the number of workers; `done` of the `total` runs
    are finished already.
    """

    def __init__(self, out: Console, header: Callable[[int, int], str], total: int, done: int) -> None:
        self._out, self._header, self._total, self._done = out, header, total, done
        self._lock = threading.Lock()
        self._begun: dict[PlannedRun, float] = {}
        self._tasks: dict[PlannedRun, TaskID] = {}
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            console=out,
            disable=not out.is_terminal or out.is_dumb_terminal,
            transient=True,
        )

    def __enter__(self) -> ProgressPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line as it is, above the live lines."""
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)

    def started(self, at_once: int, workers: int) -> None:
        self.say(self._header(at_once, workers))
        self._progress.start()
        if self._done:
            self.say(f"{self._done} of {self._total} are done already")

    def began(self, run: PlannedRun) -> None:
        with self._lock:
            self._begun[run] = time.monotonic()
            self._tasks[run] = self._progress.add_task(str(run), total=run.spec.settings.steps, numbers="starting")

    def progress(self, run: PlannedRun, steps: int, score: float | None) -> None:
        numbers = f"{steps:,} steps" + ("" if score is None else f", return {score:.1f}")
        self._progress.update(self._tasks[run], completed=steps, numbers=numbers)

    def printed(self, run: PlannedRun, text: str) -> None:
        self.say(f"{run}: {text}")

    def ended(self, run: PlannedRun, failure: str) -> None:
        with self._lock:
            self._progress.remove_task(self._tasks.pop(run))
            seconds = time.monotonic() - self._begun[run]
            if failure:
                self.say(f"{run} failed after {seconds:.1f} s: {failure}")
                return
            paused = not run.finished
            self._done += not paused
            last = run.folder.metrics()[-1]
            score = last.get("rollout/ep_rew_mean")
            self.say(
                f"{run}: {'paused at ' if paused else ''}{last['time/total_timesteps']:,} steps in {seconds:.1f} s"
                + ("" if score is None else f", return {score:.1f}")
                + f"; digest {last['digest']} ({self._done} of {self._total})"
            )
