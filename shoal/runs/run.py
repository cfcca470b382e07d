"""A run from settings to results: puts environment, engine, algorithm, trackers and folder together, and drives them.

The only module that picks concrete classes. The loop tracks, checkpoints and stops; the algorithm only learns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal import __version__, algos, engines
from shoal.base import disk, signals
from shoal.base.host import available_cores
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.engines.fingerprint import fingerprint
from shoal.engines.processes import ProcessesEngine
from shoal.engines.serial import SerialEngine
from shoal.errors import DiskFault, UsageError
from shoal.learning import xla
from shoal.runs.folder import RunDir, policy_file
from shoal.runs.loop import Loop, Result
from shoal.runs.settings import Settings
from shoal.runs.track import Tracker
from shoal.runs.track.console import console_tracker
from shoal.runs.track.files import JsonLines
from shoal.runs.track.tensorboard import TensorBoard
from shoal.runs.usage import Usage

log = logging.getLogger("shoal.run")

_START = "start.safetensors"  # in a run's folder


def train(
    algo: str, settings: Settings, config: Any, *, engine: Engine | None = None, trackers: Sequence[Tracker] = (),
    console: Console | None = None,
) -> Result:  # fmt: skip
    """Start a new run and train until its goal is reached. Settings are checked before anything is written."""
    run, settings = create(algo, settings, config)
    try:
        with run.lock():
            return _drive(run, algo, settings, config, None, 0, engine, trackers, console)
    except UsageError:
        run.discard()  # or its name would be taken by a run that cannot begin
        raise


def create(algo: str, settings: Settings, config: Any) -> tuple[RunDir, Settings]:
    """The folder of a new run, with all that `resume` needs to begin it, and its settings completed."""
    problems = _problems(settings, config)
    if settings.vector and config.samples != "fragments":
        problems.append(f"vector goes only with --batch fragments, which {algo} does not have or was not given")
    start = b""
    try:
        start = _start(settings, config)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    threads = settings.learner_threads or xla.threads_for(config.hidden)
    xla.start(threads)
    settings = replace(settings, learner_threads=threads)
    record = {
        "algo": algo,
        "settings": asdict(settings),
        "config": asdict(config),
        "versions": _versions(algo),
        "fingerprint": fingerprint(),
        "schedule_ends": {"0": schedule_end(settings, config)},
    }
    run = RunDir.create(Path(settings.runs), settings.name, f"{algo}-{settings.env.rpartition(':')[2]}", record)
    if start:  # a copy, because a run that is still learning replaces its policy
        disk.write_file(run.path / _START, start)
    return run, settings


def _start(settings: Settings, config: Any) -> bytes:
    """The policy file that a run starts from; empty if it starts from none."""
    name = config.start
    if name is None:
        return b""
    path = policy_file(name, Path(settings.runs))
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"the policy {path} of --from {name} cannot be read: {error.strerror}") from None


def resume(
    name: str,
    root: Path,
    changes: dict[str, Any],
    *,
    engine: Engine | None = None,
    trackers: Sequence[Tracker] = (),
    console: Console | None = None,
) -> Result:
    """Go on with a run from its newest checkpoint. `changes` may replace the engine, the workers and the goal."""
    run = RunDir.find(root, name)
    with run.lock():
        record, settings, config = recorded(run, changes)
        iteration, state = run.load() or (0, None)
        goal = {key: value for key, value in changes.items() if key in ("steps", "iterations")}
        before = schedule_ends(record, config)
        ends = _moved(before, iteration, schedule_end(settings, config))
        if goal or ends != before:  # kept, so that another resume has the same goal, and a replay each iteration's
            record["settings"] |= goal
            run.write_config(record | {"schedule_ends": {str(after): end for after, end in ends.items()}})
        if goal and config.scheduled:
            log.warning("the schedules of this run end at its goal, so a new goal changes them from here on")
        lines = [line for line in run.metrics() if line["iteration"] == iteration]
        if lines and settings.goal.reached(iteration, lines[0]) >= 1:
            return Result(run, iteration, lines[0], 0.0, "")
        xla.start(settings.learner_threads or 1)
        return _drive(run, record["algo"], settings, config, state, iteration, engine, trackers, console)


def recorded(run: RunDir, changes: dict[str, Any]) -> tuple[dict[str, Any], Settings, Any]:
    """What a run was started with: the whole record, and from it, checked, settings and the algorithm's settings."""
    record = run.config()
    settings = Settings(**{**record["settings"], **changes, "runs": str(run.path.parent)})
    config = algos.load(record["algo"]).Config(**tuples(record["config"]))
    problems = _problems(settings, config)
    if problems:
        raise UsageError(problems)
    _compare(record)
    return record, settings, config


def located(config: Any, root: Path) -> Any:
    """An algorithm's settings with the path of the policy that it starts from, for runs that will be elsewhere."""
    name = config.start
    return config if name is None else replace(config, start=str(policy_file(name, root).absolute()))


def started(run: RunDir, config: Any) -> Any:
    """An algorithm's settings with the run's own copy of the policy that it started from, if it did from one."""
    return replace(config, start=str(run.path / _START)) if config.start else config


def _problems(settings: Settings, config: Any) -> list[str]:
    """What is wrong with settings, each for themselves and together."""
    problems: list[str] = settings.problems() + config.problems()
    if settings.iterations is not None and config.scheduled and config.steps_per_iteration is None:
        problems.append(
            f"linear schedules end at a number of environment steps, and nobody knows before how many "
            f"{settings.iterations} iterations of whole episodes take: give --steps N instead of --iterations, or "
            f"constant schedules"
        )
    return problems


def schedule_end(settings: Settings, config: Any) -> int:
    """Environment steps at which schedules end: the goal."""
    if settings.iterations is None or not config.scheduled:
        return settings.steps
    return int(settings.iterations * config.steps_per_iteration)


def schedule_ends(record: dict[str, Any], config: Any) -> dict[int, int]:
    """Where schedules end, by the iteration after which that holds: a resume with a new goal moves the end."""
    known = record.get("schedule_ends", {"0": schedule_end(Settings(**record["settings"]), config)})
    return {int(after): end for after, end in known.items()}


def _moved(ends: dict[int, int], iteration: int, end: int) -> dict[int, int]:
    """The same with another end from an iteration on."""
    kept = {after: old for after, old in ends.items() if after < iteration}
    return kept if kept and kept[max(kept)] == end else kept | {iteration: end}


def _compare(record: dict[str, Any]) -> None:
    """Warn if this is not the software and arithmetic that the run was started with."""
    then, now = record["versions"] | record["fingerprint"], _versions(record["algo"]) | fingerprint()
    differs = [
        f"{key} {then.get(key)} then, {now.get(key)} now" for key in sorted(then | now) if then.get(key) != now.get(key)
    ]
    if differs:
        log.warning(
            "the run was started with other versions, so its bits may differ from here on: %s", "; ".join(differs)
        )


def _drive(
    run: RunDir,
    algo: str,
    settings: Settings,
    config: Any,
    state: Tree | None,
    iteration: int,
    engine: Engine | None,
    trackers: Sequence[Tracker],
    console: Console | None,
) -> Result:
    """Get an engine and the trackers ready, and loop. The caller holds the run."""
    console = console or Console()
    module = algos.load(algo)
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.listening())
        if engine is None:
            options: dict[str, Any] = {}
            if settings.engine != "serial":
                options = {"task_timeout": settings.task_timeout, "allow_mixed": settings.allow_mixed}
                options |= json.loads(settings.engine_options)
            engine = stack.enter_context(engines.make(settings.engine, settings.workers, **options))
        try:
            run.cut_metrics(iteration)
            own: list[Tracker] = [JsonLines(run.metrics_file)]
            if settings.tensorboard:
                own.append(TensorBoard(run.path))
        except OSError as error:
            raise DiskFault(f"nothing can be written to {run.path}: {error.strerror}") from None
        own.append(console_tracker(console, f"{algo} {settings.env}", settings.goal))
        for tracker in own:
            stack.callback(_close, tracker)
        end = schedule_end(settings, config)
        config = started(run, config)
        steps = module.train(config, settings.env_spec, engine, settings.seed, end, state)
        # An engine with workers elsewhere has cores elsewhere, which nobody here knows.
        cores = available_cores() if isinstance(engine, SerialEngine | ProcessesEngine) else None
        usage = Usage(engine.workers, config.lanes, cores)
        loop = Loop(run, settings, engine, [*own, *trackers], usage)
        return loop.drive(steps, iteration)
    raise AssertionError("unreachable")


def _close(tracker: Tracker) -> None:
    try:
        tracker.close()
    except OSError as error:
        log.warning("%s could not be closed: %s", type(tracker).__name__, error.strerror)


def _versions(algo: str) -> dict[str, str]:
    names = ("jax", "jaxlib", "optax", "numpy", "gymnasium", *algos.load(algo).Config.packages)
    return {"shoal": __version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in names
    }


def tuples(config: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; settings have no lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
