"""A run from settings to results: puts environment, engine, algorithm, trackers and folder together, and drives them.

The only module that picks concrete classes. The loop tracks, checkpoints and stops; the algorithm only learns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from shoal import __version__, algos, bounds, engines, interrupts, learner, trees
from shoal.advice import Usage
from shoal.algos import Step
from shoal.engines.base import Engine
from shoal.engines.fingerprint import fingerprint
from shoal.engines.processes import ProcessesEngine, available_cores
from shoal.engines.serial import SerialEngine
from shoal.envs.make import EnvSpec, check_id
from shoal.errors import DiskFault, UsageError
from shoal.rundir import RunDir, check_name
from shoal.seeding import MAX_SEED
from shoal.track import Tracker
from shoal.track.console import Goal, console_tracker
from shoal.track.files import JsonLines
from shoal.track.tensorboard import TensorBoard
from shoal.trees import Tree

log = logging.getLogger("shoal.run")

_FAILED_SAVES = 3  # in a row, before a run that cannot save gives up


@dataclass(frozen=True)
class Settings:
    """Everything about a run but the algorithm's own settings."""

    env: tyro.conf.Positional[str]
    """Environment: a Gymnasium id, or module:Env-v0 to import the module first."""
    steps: Annotated[int, tyro.conf.arg(aliases=["-n", "--total-timesteps"])] = 100_000
    """Environment steps to learn from (at least)."""
    iterations: int | None = None
    """Stop after this many iterations instead."""
    seed: int = 0
    """Everything random follows from it."""
    engine: str = "processes"
    """Who runs the environments: serial, processes, mpi, ray or ray://HOST:PORT. Does not change the result."""
    workers: int | None = None
    """How many workers; one per core unless told. Does not change the result."""
    engine_options: str = "{}"
    """Options of the engine, as JSON; for ray: placement (spread or pack), num_cpus, resources, runtime_env."""
    env_kwargs: str = "{}"
    """Keyword arguments for the environment, as JSON."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; the environment's own limit unless told."""
    step_limit: int = 100_000
    """An episode longer than this is an error: the environment never ends."""
    recreate_after: int = 0
    """Make environments anew after this many episodes, for those that leak memory."""
    vector: Literal["envpool", "gymnasium"] | None = None
    """Step lanes as one native vector environment: EnvPool's, or the environment's own vector form. Another
    implementation of the environment, so another result; equal on every engine all the same."""
    runs: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """Name of this run; algorithm, environment and a number unless told."""
    checkpoint_every: int = 50
    """Iterations between checkpoints, at most."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints, at most."""
    keep_checkpoints: int = 3
    """How many checkpoints to keep."""
    learner_threads: int | None = None
    """Threads of the learner. Changes the last bits, so it is kept with the run; chosen by network size unless told."""
    restarts: int = 3
    """How often to start again from the last checkpoint after a rank died; for mpi, where Shoal started mpirun."""
    task_timeout: float | None = None
    """Seconds after which a worker that is still busy with one task is replaced; never unless told."""
    allow_mixed: bool = False
    """Accept workers whose versions or arithmetic differ, and give up equal results."""
    tensorboard: bool = True
    """Write TensorBoard files."""

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        options = _json_object(self.engine_options)
        found = engines.check(self.engine, self.workers, options) + check_id(self.env)
        found += check_name(self.name) if self.name is not None else []
        found += bounds.problems(
            self,
            at_least_one=(
                "steps", "iterations", "max_episode_steps", "step_limit", "checkpoint_every", "keep_checkpoints",
                "learner_threads",
            ),
            above_zero=("checkpoint_seconds", "task_timeout"),
            not_negative=("recreate_after", "restarts"),
        )  # fmt: skip
        if self.vector and self.recreate_after:
            found.append("recreate_after does not go with vector: vector lanes are made anew by themselves")
        if not 0 <= self.seed <= MAX_SEED:
            found.append(f"seed must be in 0..{MAX_SEED}, not {self.seed}")
        for name, example in (("env_kwargs", '{"gravity": -5}'), ("engine_options", '{"placement": "pack"}')):
            text = getattr(self, name)
            if _json_object(text) is None:
                found.append(f"{name} must be a JSON object such as '{example}', not {text}")
        return found

    @property
    def env_spec(self) -> EnvSpec:
        """The environment."""
        return EnvSpec(
            self.env,
            json.loads(self.env_kwargs),
            self.max_episode_steps,
            self.recreate_after,
            self.step_limit,
            self.vector,
        )

    @property
    def goal(self) -> Goal:
        """When to stop."""
        return Goal(self.steps, self.iterations)


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: RunDir
    iteration: int
    metrics: dict[str, Any]
    seconds: float
    advice: str
    """What limited the run, and whether more workers would help."""


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def train(
    algo: str, settings: Settings, config: Any, *, engine: Engine | None = None, trackers: Sequence[Tracker] = (),
    console: Console | None = None,
) -> Result:  # fmt: skip
    """Start a new run and train until its goal is reached. Settings are checked before anything is written."""
    run, settings = create(algo, settings, config)
    with run.lock():
        return _drive(run, algo, settings, config, None, 0, engine, trackers, console)


def create(algo: str, settings: Settings, config: Any) -> tuple[RunDir, Settings]:
    """The folder of a new run, with all that `resume` needs to begin it, and its settings completed."""
    problems = settings.problems() + config.problems()
    if settings.vector and getattr(config, "batch", None) != "fragments":
        problems.append(f"vector goes only with --batch fragments, which {algo} does not have or was not given")
    if problems:
        raise UsageError(problems)
    threads = settings.learner_threads or learner.threads_for(config.hidden)
    learner.start(threads)
    settings = replace(settings, learner_threads=threads)
    record = {
        "algo": algo,
        "settings": asdict(settings),
        "config": asdict(config),
        "versions": _versions(),
        "fingerprint": fingerprint(),
        "schedule_ends": {"0": schedule_end(settings, config)},
    }
    run = RunDir.create(Path(settings.runs), settings.name, f"{algo}-{settings.env.rpartition(':')[2]}", record)
    return run, settings


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
        if goal and "linear" in (record["config"].get("lr_schedule"), record["config"].get("clip_schedule")):
            log.warning("the schedules of this run end at its goal, so a new goal changes them from here on")
        lines = [line for line in run.metrics() if line["iteration"] == iteration]
        if lines and settings.goal.reached(iteration, lines[0]) >= 1:
            return Result(run, iteration, lines[0], 0.0, "")
        learner.start(settings.learner_threads or 1)
        return _drive(run, record["algo"], settings, config, state, iteration, engine, trackers, console)


def recorded(run: RunDir, changes: dict[str, Any]) -> tuple[dict[str, Any], Settings, Any]:
    """What a run was started with: the whole record, and from it, checked, settings and the algorithm's settings."""
    record = run.config()
    settings = Settings(**{**record["settings"], **changes, "runs": str(run.path.parent)})
    config = algos.load(record["algo"]).Config(**_tuples(record["config"]))
    problems = settings.problems() + config.problems()
    if problems:
        raise UsageError(problems)
    _compare(record)
    return record, settings, config


def schedule_end(settings: Settings, config: Any) -> int:
    """Environment steps at which schedules end: the goal."""
    return settings.steps if settings.iterations is None else int(settings.iterations * config.batch_steps)


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
    then, now = record["versions"] | record["fingerprint"], _versions() | fingerprint()
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
        stack.enter_context(interrupts.listening())
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
        steps = module.train(config, settings.env_spec, engine, settings.seed, end, state)
        # An engine with workers elsewhere has cores elsewhere, which nobody here knows.
        cores = available_cores() if isinstance(engine, SerialEngine | ProcessesEngine) else engine.workers
        usage = Usage(engine.workers, config.lanes, cores)
        loop = _Loop(run, settings, engine, [*own, *trackers], usage)
        return loop.drive(steps, iteration)
    raise AssertionError("unreachable")


def _close(tracker: Tracker) -> None:
    try:
        tracker.close()
    except OSError as error:
        log.warning("%s could not be closed: %s", type(tracker).__name__, error.strerror)


class _Loop:
    """One sitting of a run: from here to the goal, an error or a signal."""

    def __init__(
        self,
        run: RunDir,
        settings: Settings,
        engine: Engine,
        trackers: Sequence[Tracker],
        usage: Usage,
    ) -> None:
        self.run, self.settings, self.engine = run, settings, engine
        self.trackers, self.usage = trackers, usage
        self.begun = self.saved_at = self.marked_at = time.monotonic()
        lines = run.metrics()
        self.steps_before = lines[-1]["time/total_timesteps"] if lines else 0
        self.busy_before = engine.telemetry().busy_seconds
        self.last: tuple[int, Step, dict[str, Any]] | None = None
        self.saved_iteration = 0
        self.failed_saves = 0

    def drive(self, steps: Iterator[Step], iteration: int) -> Result:
        """Take steps until the goal is reached. Whatever ends the loop, the last whole iteration is saved."""
        self.saved_iteration = iteration
        try:
            for step in steps:
                with interrupts.held():
                    iteration += 1
                    metrics = self._complete(iteration, step)
                    self.last = (iteration, step, metrics)
                    for tracker in self.trackers:
                        self._write(tracker, iteration, metrics)
                    done = self.settings.goal.reached(iteration, metrics) >= 1
                    if done or self._due(iteration):
                        self._save(last_chance=done)
                if done:
                    seconds = time.monotonic() - self.begun
                    return Result(self.run, iteration, metrics, seconds, self.usage.advice())
        except DiskFault:
            raise
        except BaseException as error:
            with interrupts.held():
                self._save(last_chance=True)
            if self.saved_iteration:
                error.add_note(f"saved iteration {self.saved_iteration}; {self._go_on()}")
            raise
        raise AssertionError("an algorithm's steps never end by themselves")

    def _complete(self, iteration: int, step: Step) -> dict[str, Any]:
        """The metrics of a step with speed, idle share and digests."""
        now, telemetry = time.monotonic(), self.engine.telemetry()
        steps = step.metrics["time/total_timesteps"] - self.steps_before
        wall = max(now - self.marked_at, 1e-9)
        busy = telemetry.busy_seconds - self.busy_before
        idle = 1.0 - busy / (wall * self.engine.workers)
        self.marked_at, self.busy_before = now, telemetry.busy_seconds
        if self.last is not None:  # the first iteration starts workers and compiles
            sampling, learning = step.metrics["time/sample_seconds"], step.metrics["time/learn_seconds"]
            self.usage.add(sampling, learning, busy, step.metrics.get("time/overlap_seconds", 0.0))
        parts = trees.digests(step.learned)
        return step.metrics | {
            "time/fps": steps / max(now - self.begun, 1e-9),
            "time/time_elapsed": now - self.begun,
            "time/idle_share": min(max(idle, 0.0), 1.0),
            "time/lost_workers": telemetry.lost_workers,
            "time/limited_by": self.usage.limit(),
            "digest": trees.digest(parts),
            "digests": parts,
        }

    def _write(self, tracker: Tracker, iteration: int, metrics: dict[str, Any]) -> None:
        try:
            tracker.write(iteration, metrics)
        except OSError as error:
            raise DiskFault(self._cannot("metrics", iteration, error)) from None

    def _due(self, iteration: int) -> bool:
        if self.failed_saves:
            return True
        waited = time.monotonic() - self.saved_at
        return (
            iteration - self.saved_iteration >= self.settings.checkpoint_every
            or waited >= self.settings.checkpoint_seconds
        )

    def _save(self, last_chance: bool = False) -> None:
        """Save the last whole iteration. A full disk is reported and tried again; the old checkpoint stays."""
        if self.last is None or self.last[0] == self.saved_iteration:
            return
        iteration, step, _ = self.last
        try:
            self.run.save(iteration, step.state(), step.policy, self.settings.keep_checkpoints)
        except OSError as error:
            self.failed_saves += 1
            message = self._cannot("checkpoint", iteration, error)
            if last_chance or self.failed_saves >= _FAILED_SAVES:
                raise DiskFault(message) from None
            log.warning("%s", message)
        else:
            self.saved_iteration, self.saved_at, self.failed_saves = iteration, time.monotonic(), 0

    def _cannot(self, what: str, iteration: int, error: OSError) -> str:
        good = (
            f"the last good checkpoint is iteration {self.saved_iteration}"
            if self.saved_iteration
            else "there is no checkpoint yet"
        )
        return (
            f"the {what} of iteration {iteration} could not be written to {self.run.path}: {error.strerror}; {good}. "
            f"Make room, then {self._go_on()}"
        )

    def _go_on(self) -> str:
        return f"go on with: {resume_command(self.run)}"


def resume_command(run: RunDir) -> str:
    """What to type to go on with a run."""
    return f"{program()} resume {run.name}{on_runs(run)}"


def program() -> str:
    """How to call Shoal from the shell that this was started from: it may live in a virtualenv that is not active."""
    started_as = Path(sys.argv[0])
    return str(started_as) if started_as.name == "shoal" and shutil.which("shoal") is None else "shoal"


def on_runs(run: RunDir) -> str:
    """The flag that names the folder of a run, where it is not the usual one."""
    return "" if run.path.parent == Path("runs") else f" --runs {run.path.parent}"


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "optax", "numpy", "gymnasium")
    return {"shoal": __version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in names
    }


def _tuples(config: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; settings have no lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
