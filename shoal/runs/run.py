"""Start and resume runs: put environment, engine, algorithm, trackers and folder together, and train to the goal."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal import algos, engines
from shoal.algos.base import AlgorithmConfig, Step
from shoal.base import disk, signals
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.errors import DiskFault, EnvironmentFault, UsageError
from shoal.learning import xla
from shoal.runs.checkpoints import Checkpoint
from shoal.runs.folder import RunDir, RunRecord
from shoal.runs.loop import Loop, RunResult, ends
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec, start_from, warn_of_changes
from shoal.runs.track import Tracker
from shoal.runs.track.console import console_tracker
from shoal.runs.track.files import JsonLines
from shoal.runs.track.tensorboard import TensorBoard
from shoal.runs.trust import trust_run
from shoal.runs.usage import Usage

log = logging.getLogger("shoal.run")

_START = "start.safetensors"  # a run's copy of the policy that it started from


def train(
    spec: RunSpec, *, engine: Engine | None = None, trackers: Sequence[Tracker] = (), console: Console | None = None,
    pause: int | None = None,
) -> RunResult:  # fmt: skip
    """Start a new run and train until its goal is reached. Settings are checked before anything is written.

    `pause` ends this sitting early, at the first iteration with that many environment steps: neither the goal nor the
    schedules change, so that a resume gives the bits of an uninterrupted run.
    """
    run, spec = create(spec)
    try:
        with run.lock():
            return _train(run, spec, Checkpoint(0, None), engine, trackers, console, pause)
    except (UsageError, EnvironmentFault):
        run.discard()  # or a run that cannot begin would keep its name
        raise


def create(spec: RunSpec) -> tuple[RunDir, RunSpec]:
    """Create the folder of a new run, from which `resume` can begin it; also complete its settings."""
    problems = spec.problems()
    start = b""
    try:
        start = spec.start_content()
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    spec = spec.completed()
    stem = f"{algos.short_name(spec.algo)}-{spec.settings.env.rpartition(':')[2]}"
    run = RunDir.create(Path(spec.settings.runs), spec.settings.name, stem, spec.to_record())
    if start:  # a copy, because the run that it comes from may replace its policy
        disk.write_file(run.path / _START, start)
    return run, spec


def resume(
    name: str,
    root: Path,
    changes: Mapping[str, Any],
    *,
    engine: Engine | None = None,
    trackers: Sequence[Tracker] = (),
    console: Console | None = None,
    allow: Collection[str] = (),
    pause: int | None = None,
) -> RunResult:
    """Continue a run from its newest checkpoint. `changes` may replace the engine, the workers and the goal.

    `pause` ends this sitting early, as in `train`.
    """
    run = RunDir.find(root, name)
    with run.lock():
        record, spec = recorded(run, changes, allow)
        checkpoint = run.load()
        rows = [row for row in run.metrics() if row["iteration"] == checkpoint.iteration]
        if rows and ends(spec.settings.goal, pause, rows[0]):
            return RunResult(run, rows[0], 0.0, "")
        _record_goal(run, record, spec, checkpoint.iteration, changes)
        return _train(run, spec, checkpoint, engine, trackers, console, pause)


def resume_changes(
    steps: int | None = None, iterations: int | None = None, engine: str | None = None, workers: int | None = None
) -> dict[str, Any]:
    """Return the settings that a resume with these arguments replaces."""
    given = {"steps": steps, "iterations": iterations, "engine": engine, "workers": workers}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if engine is not None:  # the options and the number of workers belong to the old engine
        changes |= {"engine_options": "{}"} | ({} if workers else {"workers": None})
    if steps is not None:
        changes.setdefault("iterations", None)
    return changes


def recorded(run: RunDir, changes: Mapping[str, Any], allow: Collection[str] = ()) -> tuple[RunRecord, RunSpec]:
    """Read and check what a run was started with; warn if versions have changed since."""
    record = run.record()
    trust_run(run, record, allow)
    spec = RunSpec.from_record(record, {**changes, "runs": str(run.path.parent)})
    problems = spec.problems()
    if problems:
        raise UsageError(problems)
    warn_of_changes(record)
    return record, spec


def _record_goal(run: RunDir, record: RunRecord, spec: RunSpec, iteration: int, changes: Mapping[str, Any]) -> None:
    """Record a new goal, so that another resume has it too, and the schedule that a replay of each iteration needs."""
    goal = {key: value for key, value in changes.items() if key in ("steps", "iterations")}
    before, end = spec.schedule_ends(record), spec.schedule_end
    ends = {after: old for after, old in before.items() if after < iteration}
    if not ends or ends[max(ends)] != end:
        ends[iteration] = end
    if goal or ends != before:
        record["settings"] |= goal
        record["schedule_ends"] = {str(after): end for after, end in ends.items()}
        run.write_record(record)
    if goal and spec.config.scheduled:
        log.warning("the schedules of this run end at its goal, so the new goal changes them from here on")


def _train(
    run: RunDir,
    spec: RunSpec,
    checkpoint: Checkpoint,
    engine: Engine | None,
    trackers: Sequence[Tracker],
    console: Console | None,
    pause: int | None,
) -> RunResult:
    """Set up an engine and the trackers, and loop. The caller holds the run."""
    settings = spec.settings
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.listening())
        if engine is None:
            engine = stack.enter_context(make_engine(settings))
        try:
            run.cut_metrics(checkpoint.iteration)
            own: list[Tracker] = [JsonLines(run.metrics_file)]
            if settings.tensorboard:
                own.append(TensorBoard(run.path))
        except OSError as error:
            raise DiskFault(f"nothing can be written to {run.path}: {error.strerror}") from None
        title = f"{algos.short_name(spec.algo)} {settings.env}"
        own.append(console_tracker(console or Console(), title, settings.goal))
        for tracker in own:
            stack.callback(close_tracker, tracker)
        config = start_from(spec.config, run.path / _START)
        steps = stack.enter_context(learning(spec, config, engine, checkpoint.state))
        usage = Usage(engine.workers, config.lanes, engine.shared_cores)
        loop = Loop(run, settings, engine, [*own, *trackers], usage, pause)
        return loop.drive(steps, checkpoint.iteration)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def learning(
    spec: RunSpec, config: AlgorithmConfig, engine: Engine, state: Tree | None = None
) -> Iterator[Iterator[Step]]:
    """Learn during a block: in this process or, where that would change bits, in a child process."""
    with xla.claimed(spec.settings.learner_threads or 1, spec.settings.device) as here:
        if here:
            yield spec.steps(config, engine, state)
            return
        from shoal.runs.learner_process import LearnerProcess

        with LearnerProcess(spec, config, engine, state) as learner:
            yield learner.steps()


def make_engine(settings: Settings) -> Engine:
    """Make the engine of a run."""
    options: dict[str, Any] = {}
    if settings.engine != "serial":
        options = {"task_timeout": settings.task_timeout, "allow_mixed": settings.allow_mixed}
        options |= json.loads(settings.engine_options)
    return engines.make(settings.engine, settings.workers, **options)


def close_tracker(tracker: Tracker) -> None:
    """Close a tracker; a full disk must not hide how the run ended."""
    try:
        tracker.close()
    except OSError as error:
        log.warning("%s could not be closed: %s", type(tracker).__name__, error.strerror)
