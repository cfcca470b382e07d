"""The commands `train` and `resume`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console

from shoal.cli.console import console, say
from shoal.cli.parsing import parse, parse_spec
from shoal.errors import Stopped

if TYPE_CHECKING:
    from shoal.runs.loop import RunResult


def train(words: list[str]) -> int:
    """Train a new run to its goal."""
    spec = parse_spec("train", words)
    from shoal.commands import mpirun
    from shoal.runs import run

    out = console()
    if mpirun.is_needed(spec.settings.engine):
        return mpirun.train_under_mpirun(spec)
    try:
        result = run.train(spec, console=out)
    except Stopped as stop:
        return _report_stop(out, stop)
    return _report(out, result)


@dataclass(frozen=True)
class ResumeArgs:
    """Continue a run exactly where its newest checkpoint is, on any engine and number of workers."""

    run: tyro.conf.Positional[str]
    """Name of the run, or path of its folder."""
    steps: int | None = None
    """New goal in environment steps, to continue a finished run (default: the run's goal)."""
    iterations: int | None = None
    """New goal in iterations (default: the run's goal)."""
    engine: str | None = None
    """Another engine (default: the run's engine)."""
    workers: int | None = None
    """Another number of workers (default: the run's, or with --engine, one per core)."""
    runs: str = "runs"
    """Folder of all runs."""
    allow: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Module to import for a run of another user or a policy file without a run; may be repeated (default: none)."""


def resume(words: list[str]) -> int:
    """Continue a run to its goal."""
    wanted = parse(ResumeArgs, words, "resume")
    from shoal.commands import mpirun
    from shoal.runs import run
    from shoal.runs.folder import RunDir
    from shoal.runs.settings import Settings

    changes = run.resume_changes(wanted.steps, wanted.iterations, wanted.engine, wanted.workers)
    out = console()
    found = RunDir.find(Path(wanted.runs), wanted.run)
    settings = Settings(**found.record()["settings"] | changes)
    if mpirun.is_needed(settings.engine):
        goal = [f"--{key}={changes[key]}" for key in ("steps", "iterations") if changes.get(key)]
        goal += [f"--allow={module}" for module in wanted.allow]
        return mpirun.resume_under_mpirun(found, settings.workers, settings.restarts, goal)
    try:
        result = run.resume(wanted.run, Path(wanted.runs), changes, console=out, allow=wanted.allow)
    except Stopped as stop:
        return _report_stop(out, stop)
    return _report(out, result)


def _report_stop(out: Console, stop: Stopped) -> int:
    """Print what was saved before a signal ended the run, and return the exit code."""
    for note in getattr(stop, "__notes__", ["nothing was learned yet, so nothing was saved"]):
        say(out, f"{stop}: {note}")
    return 128 + stop.number


def _report(out: Console, result: RunResult) -> int:
    """Print the result of a run and the commands to run next, and return the exit code."""
    from shoal.runs.hints import program, resume_command, runs_flag

    metrics, run = result.metrics, result.run
    if result.seconds == 0:
        further = f"{resume_command(run)} --steps {2 * metrics['time/total_timesteps']}"
        say(out, f"{run.name} has reached its goal already. To continue it, run: {further}")
        return 0
    score, own = metrics.get("rollout/ep_rew_mean"), metrics.get("eval/mean_reward")
    steps, speed, idle = metrics["time/total_timesteps"], metrics["time/fps"], metrics["time/idle_share"]
    say(
        out,
        f"Done:   {steps:,} steps in {result.seconds:.1f} s ({speed:,.0f} steps/s, workers idle {idle:.0%})\n"
        f"Return: {'no episode has ended yet' if score is None else f'{score:.1f}, mean of the last 100 episodes'}"
        f"{'' if own is None else f'; {own:.1f} for the policy itself in the last generation'}\n"
        f"Limit:  {result.advice}\n"
        f"Digest: {metrics['digest']}, equal for this seed on every engine and number of workers\n"
        f"Saved:  {run.path}\n"
        f"Next:   {program()} evaluate {run.name}{runs_flag(run)}\n"
        f"        {resume_command(run)} --steps {2 * steps}",
    )
    if shutil.which("tensorboard"):
        say(out, f"        tensorboard --logdir {run.path.parent}")
    return 0
