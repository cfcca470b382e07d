"""Is the result really the same? Runs the same settings in several ways and compares every iteration's digest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal import engines
from shoal.base import signals
from shoal.base.host import available_cores, shoal_command
from shoal.engines.base import Engine
from shoal.errors import UsageError
from shoal.runs import run
from shoal.runs.folder import RunDir
from shoal.runs.metrics import MetricsRow
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec, located
from shoal.runs.track import Tracker
from shoal.testing import redis_faults
from shoal.testing.redis_rig import RedisRig

_DEADLINE = 600.0  # seconds for a head that is to be killed to get that far


@dataclass(frozen=True)
class RunVariant:
    """One way to run the same settings."""

    engine: str
    workers: int | None = None
    fault: str = ""
    """"", "kill-workers" or "kill-head"."""
    then: tuple[str, int | None] | None = None
    """Engine and workers of the resume, after the head was killed."""

    def __str__(self) -> str:
        text = _label(self.engine, self.workers)
        if self.fault == "kill-workers":
            killed = {"mpi": "a rank killed half-way", "redis": redis_faults.DESCRIPTION}
            return f"{text}, {killed.get(self.engine, 'a worker killed each iteration')}"
        return text if self.then is None else f"{text}, head killed, resumed on {_label(*self.then)}"


@dataclass(frozen=True)
class VariantResult:
    """What one way gave: the lines of its metrics file, and how many workers it lost."""

    way: RunVariant
    lines: list[MetricsRow]
    lost_workers: int
    seconds: float


def parse_engines(text: str) -> list[tuple[str, int | None]]:
    """`serial,processes:3` as engine names and numbers of workers."""
    found: list[tuple[str, int | None]] = []
    problems: list[str] = []
    for item in text.split(","):
        name, _, count = item.strip().partition(":")
        if count and not count.isdigit():
            problems.append(f"{item!r} is not an engine with a number of workers, such as processes:3")
            continue
        workers = int(count) if count else None
        problems += engines.engine_problems(name, workers)
        found.append((name, workers))
    if problems:
        raise UsageError(problems)
    return found


def run_variants(chosen: Sequence[tuple[str, int | None]], kill_workers: bool, kill_head: bool) -> list[RunVariant]:
    """Every engine plainly, then with faults where it can have them."""
    plain = [RunVariant(name, workers) for name, workers in chosen]
    killed = [RunVariant(name, workers, "kill-workers") for name, workers in chosen if name != "serial"]
    following = [*chosen[1:], chosen[0]]
    resumed = [RunVariant(*first, "kill-head", then) for first, then in zip(chosen, following, strict=True)]
    return plain + killed * kill_workers + resumed * kill_head


def first_difference(spec: RunSpec, todo: Sequence[RunVariant], report: Callable[[VariantResult], None]) -> str:
    """Run every way; an empty string if all digests are equal, or the first difference in words."""
    reference: VariantResult | None = None
    spec = replace(spec, config=located(spec.config, Path(spec.settings.runs)))
    # Between runs too: a signal takes the folder along, and heads and servers that were started.
    with signals.listening(), tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        for number, way in enumerate(todo):
            name = f"way-{number}"
            own = replace(
                spec.settings, engine=way.engine, workers=way.workers, runs=folder, name=name, tensorboard=False
            )
            if way.fault:
                own = replace(own, checkpoint_every=1)  # or the resume would start from scratch
            begun = time.monotonic()
            with _rig(way, own.env) as rig:
                own = replace(own, engine=_address(way.engine, rig))
                lost = _runner(way)(replace(spec, settings=own), way, rig)
            lines = RunDir(Path(folder) / name).metrics()
            outcome = VariantResult(way, lines, lost, time.monotonic() - begun)
            report(outcome)
            if reference is None:
                reference = outcome
            elif difference := _difference(reference, outcome):
                return difference
    return ""


def _runner(way: RunVariant) -> Callable[[RunSpec, RunVariant, RedisRig | None], int]:
    if way.then is not None:
        return _with_killed_head
    return _under_mpirun if way.engine == "mpi" else _in_this_process


@contextlib.contextmanager
def _rig(way: RunVariant, env: str) -> Iterator[RedisRig | None]:
    """A Redis server and workers of its own, for a way that needs them."""
    if "redis" not in (way.engine, way.then and way.then[0]):
        yield None
        return
    module, _, _ = env.rpartition(":")
    with RedisRig(allow=[module] if module else []) as rig:
        count = (way.workers if way.engine == "redis" else way.then and way.then[1]) or available_cores()
        for machine in filter(None, (count - count // 2, count // 2)):  # two, to have something between them
            rig.add_machine(machine)
        rig.wait_for_workers(count)
        yield rig


def _address(engine: str, rig: RedisRig | None) -> str:
    return rig.address if engine == "redis" and rig is not None else engine


def _in_this_process(spec: RunSpec, way: RunVariant, rig: RedisRig | None) -> int:
    quiet = Console(quiet=True)
    options = {"lease": redis_faults.LEASE} if rig is not None and way.fault else {}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(engines.make(spec.settings.engine, way.workers, **options))
        killers: list[Tracker] = []
        if way.fault == "kill-workers" and rig is not None:
            killers = [stack.enter_context(redis_faults.RedisFaults(rig, engine, spec.settings.iterations or 1))]
            stack.callback(engine.close)  # before the end of the faults, which takes a restarted server along
        elif way.fault == "kill-workers":
            killers = [_Killer(engine)]
        run.train(spec, engine=engine, trackers=killers, console=quiet)
        return engine.telemetry().lost_workers
    raise AssertionError("unreachable")


class _Killer:
    """A tracker that has a worker killed in each iteration, once that iteration's first task is done."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closed = False
        self._strike()

    def write(self, metrics: MetricsRow) -> None:
        """An iteration is over, so the next one begins."""
        self._strike()

    def close(self) -> None:
        """No more."""

    def _strike(self) -> None:
        threading.Thread(target=_kill_one, args=(self._engine, self._engine.telemetry().tasks), daemon=True).start()


def _kill_one(engine: Engine, tasks_before: int) -> None:
    deadline = time.monotonic() + 10
    while engine.telemetry().tasks == tasks_before and time.monotonic() < deadline:
        time.sleep(0.001)
    pids = engine.pids
    if pids:
        os.kill(pids[0], signal.SIGKILL)  # the oldest: it is at work, while the youngest may still be starting


def _under_mpirun(spec: RunSpec, way: RunVariant, rig: RedisRig | None) -> int:
    """Train in a job of its own; with the fault, kill its last rank half-way and see it start again."""
    folder = RunDir(Path(spec.settings.runs) / str(spec.settings.name))
    with _training(spec) as head:
        if way.fault:
            _wait_for_half(folder, spec.settings, head)
            os.kill(_last_rank(folder), signal.SIGKILL)
        _finish(head)
    return 1 if way.fault else 0


def _with_killed_head(spec: RunSpec, way: RunVariant, rig: RedisRig | None) -> int:
    """Train in a process of its own, kill it without warning in the middle, and resume here."""
    folder = RunDir(Path(spec.settings.runs) / str(spec.settings.name))
    with _training(spec) as head:
        _wait_for_half(folder, spec.settings, head)
        head.kill()
    deadline = time.monotonic() + _DEADLINE
    while folder.busy() and time.monotonic() < deadline:
        time.sleep(0.005)  # of an MPI job only the launcher was killed; its ranks are about to notice
    if way.then is None:
        raise AssertionError("a killed head is resumed")
    name, workers = way.then
    if name == "mpi":
        words = [
            "resume",
            str(folder.path),
            "--engine",
            name,
            *([] if workers is None else ["--workers", str(workers)]),
        ]
        with _shoal(words) as head:
            _finish(head)
    else:
        if rig is not None and name == way.engine == "redis" and (workers or 0) > (way.workers or 0):
            rig.add_machine((workers or 0) - (way.workers or 0))
        changes = {"engine": _address(name, rig), "workers": workers}
        run.resume(folder.name, folder.path.parent, changes, console=Console(quiet=True))
    return 0


def _training(spec: RunSpec) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return _shoal(["train", spec.algo, spec.settings.env, *flags(spec.settings), *flags(spec.config)])


@contextlib.contextmanager
def _shoal(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has ended when the block has."""
    command = shoal_command(*words)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        except BaseException:
            process.terminate()  # or the end of this block would wait for the end of the run
            raise


def _wait_for_half(folder: RunDir, settings: Settings, head: subprocess.Popen[str]) -> None:
    half = (settings.iterations or 2) // 2
    if half < 1:
        raise UsageError("to kill something half-way there must be at least 2 iterations; use --iterations 2 or more")
    deadline = time.monotonic() + _DEADLINE
    while max(folder.saved(), default=0) < half and time.monotonic() < deadline:
        if head.poll() is not None:
            _, errors = head.communicate()
            raise UsageError(f"the run that was to be killed did not get to iteration {half}: {errors.strip()}")
        time.sleep(0.005)


def _finish(head: subprocess.Popen[str]) -> None:
    _, errors = head.communicate()
    if head.returncode:
        raise UsageError(f"the run ended with exit code {head.returncode}: {errors.strip()}")


def _last_rank(folder: RunDir) -> int:
    """Process id of a rank that works for a run, found in the process table: nothing but mpirun knows it."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = dict(
                item.split(b"=", 1) for item in (process / "environ").read_bytes().split(b"\0") if b"=" in item
            )
        except OSError:
            continue  # it has ended, or is somebody else's
        if str(folder.path.resolve()).encode() in words and b"OMPI_COMM_WORLD_RANK" in variables:
            found[int(variables[b"OMPI_COMM_WORLD_RANK"])] = int(process.name)
    return found[max(found)]


def flags(settings: Any) -> list[str]:
    """Settings as command-line flags, leaving out what was not set."""
    words = []
    for key, value in asdict(settings).items():
        name = key.replace("_", "-")
        if value is None or key == "env":
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={value}")
    return words


def _difference(reference: VariantResult, other: VariantResult) -> str:
    """The first iteration and part whose digest differs, with both values."""
    for line, theirs in zip(reference.lines, other.lines, strict=False):
        if line["digest"] != theirs["digest"]:
            parts = [part for part, value in line["digests"].items() if theirs["digests"].get(part) != value]
            numbers = [
                f"{key}: {value!r} and {theirs.get(key)!r}"
                for key, value in line.items()
                if key.startswith(("rollout/", "train/")) and value != theirs.get(key)
            ]
            return (
                f"iteration {line['iteration']} differs between {reference.way} ({line['digest']}) and {other.way} "
                f"({theirs['digest']}), in: {', '.join(parts)}. {'; '.join(numbers)}".strip()
            )
    if len(reference.lines) != len(other.lines):
        return f"{reference.way} has {len(reference.lines)} iterations and {other.way} has {len(other.lines)}"
    return ""


def _label(name: str, workers: int | None) -> str:
    return name if workers is None else f"{name}:{workers}"
