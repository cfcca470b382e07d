"""The commands `train` and `resume`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console

from shoal.cli.parsing import algorithm, console, parse, say
from shoal.errors import Stopped, UsageError

if TYPE_CHECKING:
    from shoal.runs.loop import RunResult


def train(words: list[str]) -> int:
    """Learn."""
    name, parsed = algorithm("train", words)
    from shoal.runs import run
    from shoal.runs.spec import RunSpec

    out = console()
    settings = parsed.settings
    spec = RunSpec(name, settings, parsed.config)
    if _needs_mpirun(settings.engine):
        from shoal.commands import mpirun

        created, _ = run.create(spec)
        code = UsageError.exit_code
        try:
            code = mpirun.train_under_mpirun(created, settings.workers, settings.restarts)
        finally:
            if code == UsageError.exit_code:  # here (no mpirun) or in the head: the name of a run that cannot begin
                created.discard()  # must not be taken
        return code
    return _watch(out, lambda: run.train(spec, console=out))


def _needs_mpirun(engine: str) -> bool:
    """Whether this process has to start the ranks that it wants to work with."""
    from shoal.spmd.launching import launched_rank

    here = launched_rank(os.environ)
    alone = here is None or here.size == 1
    if not alone and engine != "mpi":
        raise UsageError(f"this process is a rank of an MPI job, but the engine is {engine}. Use --engine mpi")
    return engine == "mpi" and alone


@dataclass(frozen=True)
class ResumeArgs:
    """Go on with a run, exactly where its newest checkpoint is, on any engine and number of workers."""

    run: tyro.conf.Positional[str]
    """Name of the run, or path of its folder."""
    steps: int | None = None
    """New goal in environment steps, to go on with a run that has finished."""
    iterations: int | None = None
    """New goal in iterations."""
    engine: str | None = None
    """Another engine."""
    workers: int | None = None
    """Another number of workers."""
    runs: str = "runs"
    """Folder of all runs."""


def resume(words: list[str]) -> int:
    """Go on with a run."""
    wanted = parse(ResumeArgs, words, "resume")
    from shoal.runs import run
    from shoal.runs.folder import RunDir
    from shoal.runs.settings import Settings

    changes = {key: getattr(wanted, key) for key in ("steps", "iterations", "engine", "workers")}
    changes = {key: value for key, value in changes.items() if value is not None}
    if wanted.engine is not None:
        changes |= {"engine_options": "{}"} | ({} if wanted.workers else {"workers": None})
    if wanted.steps is not None:
        changes.setdefault("iterations", None)
    out = console()
    found = RunDir.find(Path(wanted.runs), wanted.run)
    settings = Settings(**found.record()["settings"] | changes)
    if _needs_mpirun(settings.engine):
        from shoal.commands import mpirun

        goal = [f"--{key}={changes[key]}" for key in ("steps", "iterations") if changes.get(key)]
        return mpirun.train_under_mpirun(found, settings.workers, settings.restarts, goal)
    return _watch(out, lambda: run.resume(wanted.run, Path(wanted.runs), changes, console=out))


def _watch(out: Console, go: Callable[[], RunResult]) -> int:
    """Run to the end, or to a signal; then say what there is now and what to type next."""
    from shoal.runs.hints import program, resume_command, runs_flag

    try:
        result = go()
    except Stopped as stop:
        for note in getattr(stop, "__notes__", ["nothing was learned yet, so nothing was saved"]):
            say(out, f"{stop}: {note}")
        return 128 + stop.number
    metrics, run = result.metrics, result.run
    if result.seconds == 0:
        again = f"{resume_command(run)} --steps {2 * metrics['time/total_timesteps']}"
        say(out, f"{run.name} has reached its goal already. To go on, type: {again}")
        return 0
    score, own = metrics.get("rollout/ep_rew_mean"), metrics.get("eval/mean_reward")
    steps, speed, idle = metrics["time/total_timesteps"], metrics["time/fps"], metrics["time/idle_share"]
    say(
        out,
        f"Done:   {steps:,} steps in {result.seconds:.1f} s ({speed:,.0f} steps/s, workers idle {idle:.0%})\n"
        f"Return: {'no episode has ended yet' if score is None else f'{score:.1f}, mean of the last 100 episodes'}"
        f"{'' if own is None else f'; {own:.1f} for the policy that the search had then'}\n"
        f"Limit:  {result.advice}\n"
        f"Digest: {metrics['digest']}, equal for this seed on every engine and number of workers\n"
        f"Saved:  {run.path}\n"
        f"Next:   {program()} evaluate {run.name}{runs_flag(run)}\n"
        f"        {resume_command(run)} --steps {2 * steps}",
    )
    if shutil.which("tensorboard"):
        say(out, f"        tensorboard --logdir {run.path.parent}")
    return 0
