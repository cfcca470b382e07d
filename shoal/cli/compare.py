"""The command `compare`: several algorithms and seeds on one task, at the same time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shoal.base import disk, signals
from shoal.cli.parsing import console, parse, say
from shoal.errors import DiskFault, Stopped, UsageError

if TYPE_CHECKING:
    from shoal.commands.compare.plan import ComparedRun, Comparison


def compare(words: list[str]) -> int:
    """Train all runs, then show what they gave."""
    from shoal.commands.compare.plan import Comparison, plan_runs

    wanted = parse(Comparison, words, "compare")
    out = console()
    jobs = plan_runs(wanted)
    _refuse_mpi_outside_of_a_job(wanted)
    try:
        with signals.listening():
            return _run(out, wanted, jobs)
    except Stopped as stop:
        say(out, f"{stop}: all runs are saved in {wanted.folder}. To go on with them, type the same command again")
        return 128 + stop.number


def _refuse_mpi_outside_of_a_job(wanted: Comparison) -> None:
    from shoal.spmd.launching import launched_rank

    here = launched_rank(os.environ)
    if wanted.engine == "mpi" and (here is None or here.size == 1):
        ranks = 3 if wanted.workers is None else wanted.workers + 1
        raise UsageError(f"to compare on the mpi engine, start the ranks yourself: mpirun -n {ranks} shoal compare ...")


def _run(out: Console, wanted: Comparison, jobs: list[ComparedRun]) -> int:
    from shoal import engines
    from shoal.commands.compare import findings, heads
    from shoal.commands.compare.plan import threshold, tuning_warning
    from shoal.sampling.tasks import describe

    env = jobs[0].settings.env_spec
    begun = time.monotonic()
    with engines.make(wanted.engine, wanted.workers) as engine:
        engine.submit(describe, env.to_record()).result()  # an environment that cannot be made is said once, and now
        at_once = wanted.lines(engine.workers, len(jobs))
        say(
            out,
            f"{len(jobs)} runs of {jobs[0].settings.steps:,} steps on {env.id}, {at_once} at once on "
            f"{engine.workers} worker(s); in {wanted.folder}",
        )
        if warning := tuning_warning(jobs):
            say(out, warning)
        with _Watcher(out, len(jobs), sum(job.finished for job in jobs)) as watcher:
            failures = heads.train_all(jobs, engine, at_once, watcher)
        seconds = time.monotonic() - begun
        busy = engine.telemetry().busy_seconds / (seconds * engine.workers)
        found = [findings.assess(job, engine, wanted.episodes) for job in jobs if job not in failures]
    if not found:
        say(out, "All runs failed. Mend what is said above, then type the same command again")
        return 1
    text = findings.tabulate(found, threshold(wanted, env))
    note = (
        f"Score: mean return of {wanted.episodes} greedy episodes after training, mean over seeds. Along the way: mean "
        f"return of the last {findings.EPISODES} episodes (of the policy itself, where others are tried around it), by "
        f"steps. Seconds are those of one run, with {at_once} at once on {engine.workers} "
        f"worker(s) and one machine; for times of a run alone use --at-once 1."
    )
    say(out, f"\n{text}\n\n{note}\n")
    title = f"{env.id}: mean and range over {wanted.seeds} seeds" if wanted.seeds > 1 else env.id
    files = {"table.md": f"# {env.id}\n\n{text}\n\n{note}\n\n![Learning curves](curves.svg)\n"}
    if any(len(finding.known) for finding in found):
        files["curves.svg"] = findings.picture(title, found)
    _write(wanted.folder, files)
    say(out, f"Saved:   {', '.join(str(wanted.folder / name) for name in files)}")
    say(out, f"Time:    {seconds:.1f} s for {len(jobs)} runs; workers were busy {busy:.0%} of it")
    say(out, f"Runs:    shoal runs --runs {wanted.folder}")
    if failures:
        say(out, f"Failed:  {', '.join(map(str, failures))}. Type the same command again to try them again")
    return 1 if failures else 0


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        try:
            disk.write_file(folder / name, content.encode())
        except OSError as error:
            raise DiskFault(f"{folder / name} could not be written: {error.strerror}. The table is above") from None


class _Watcher:
    """A live line for each run on a terminal, and a plain line when one ends."""

    def __init__(self, out: Console, count: int, done: int) -> None:
        self._out, self._count, self._done = out, count, done
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

    def __enter__(self) -> _Watcher:
        self._progress.start()
        if self._done:
            say(self._out, f"{self._done} of {self._count} are done already")
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def began(self, job: ComparedRun) -> None:
        """Show it."""
        with self._lock:
            self._begun[job] = time.monotonic()
            self._tasks[job] = self._progress.add_task(str(job), total=job.settings.steps, numbers="starting")

    def progress(self, job: ComparedRun, steps: int, score: float | None) -> None:
        """Redraw its line."""
        numbers = f"{steps:,} steps" + ("" if score is None else f", return {score:.1f}")
        self._progress.update(self._tasks[job], completed=steps, numbers=numbers)

    def said(self, job: ComparedRun, text: str) -> None:
        """Print it."""
        say(self._out, f"{job}: {text}")

    def ended(self, job: ComparedRun, failure: str) -> None:
        """Print how."""
        with self._lock:
            self._done += not failure
            self._progress.remove_task(self._tasks.pop(job))
            seconds = time.monotonic() - self._begun[job]
            if failure:
                say(self._out, f"{job} failed after {seconds:.1f} s: {failure}")
                return
            last = job.run.metrics()[-1]
            score = last.get("rollout/ep_rew_mean")
            say(
                self._out,
                f"{job}: {last['time/total_timesteps']:,} steps in {seconds:.1f} s"
                + ("" if score is None else f", return {score:.1f}")
                + f"; digest {last['digest']} ({self._done} of {self._count})",
            )
