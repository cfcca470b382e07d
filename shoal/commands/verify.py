"""Run the same settings on several engines, with and without faults, and compare every iteration's digest."""

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

from rich.console import Console

from shoal import engines
from shoal.algos.base import AlgorithmConfig
from shoal.base import signals
from shoal.base.host import available_cores, shoal_command
from shoal.engines.base import Engine
from shoal.errors import UsageError
from shoal.runs import run
from shoal.runs.flags import spelled
from shoal.runs.folder import RunDir
from shoal.runs.metrics import MetricsRow
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec, located
from shoal.runs.track import Tracker
from shoal.testing import redis_faults
from shoal.testing.redis_rig import RedisRig

_DEADLINE = 600.0  # seconds for a head to reach the iteration in which it is killed


@dataclass(frozen=True)
class RunVariant:
    """One way to run the same settings."""

    engine: str
    workers: int | None = None
    fault: str = ""
    """Empty, "kill-workers" or "kill-head"."""
    then: tuple[str, int | None] | None = None
    """Engine and workers of the resume after the head was killed."""

    def __str__(self) -> str:
        text = _label(self.engine, self.workers)
        if self.fault == "kill-workers":
            killed = {"mpi": "a rank killed half-way", "redis": redis_faults.DESCRIPTION}
            return f"{text}, {killed.get(self.engine, 'a worker killed each iteration')}"
        return text if self.then is None else f"{text}, head killed, resumed on {_label(*self.then)}"


@dataclass(frozen=True)
class VariantResult:
    """The metrics of one variant, and the number of workers that it lost."""

    variant: RunVariant
    rows: list[MetricsRow]
    lost_workers: int
    seconds: float


def parse_engines(text: str) -> list[tuple[str, int | None]]:
    """Parse a list such as `serial,processes:3` into engine names and numbers of workers."""
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
    """List every engine without faults, then with the faults that it can have."""
    plain = [RunVariant(name, workers) for name, workers in chosen]
    killed = [RunVariant(name, workers, "kill-workers") for name, workers in chosen if name != "serial"]
    following = [*chosen[1:], chosen[0]]
    resumed = [RunVariant(*first, "kill-head", then) for first, then in zip(chosen, following, strict=True)]
    return plain + killed * kill_workers + resumed * kill_head


def first_difference(spec: RunSpec, variants: Sequence[RunVariant], report: Callable[[VariantResult], None]) -> str:
    """Run every variant and describe the first difference between digests; empty if all are equal."""
    reference: VariantResult | None = None
    spec = replace(spec, config=located(spec.config, Path(spec.settings.runs)))
    # Listen between runs, too: a signal also removes the folder and ends the heads and servers.
    with signals.listening(), tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        for number, variant in enumerate(variants):
            name = f"way-{number}"
            own = replace(
                spec.settings, engine=variant.engine, workers=variant.workers, runs=folder, name=name, tensorboard=False
            )
            if variant.fault:
                own = replace(own, checkpoint_every=1)  # or the resume would start from scratch
            begun = time.monotonic()
            with _rig(variant, own.env) as rig:
                own = replace(own, engine=_address(variant.engine, rig))
                lost = _runner(variant)(replace(spec, settings=own), variant, rig)
            rows = RunDir(Path(folder) / name).metrics()
            result = VariantResult(variant, rows, lost, time.monotonic() - begun)
            report(result)
            if reference is None:
                reference = result
            elif difference := _difference(reference, result):
                return difference
    return ""


def _runner(variant: RunVariant) -> Callable[[RunSpec, RunVariant, RedisRig | None], int]:
    if variant.then is not None:
        return _with_killed_head
    return _under_mpirun if variant.engine == "mpi" else _in_this_process


@contextlib.contextmanager
def _rig(variant: RunVariant, env: str) -> Iterator[RedisRig | None]:
    """Start a Redis server and workers for a variant that needs them."""
    if "redis" not in (variant.engine, variant.then and variant.then[0]):
        yield None
        return
    module, _, _ = env.rpartition(":")
    with RedisRig(allow=[module] if module else []) as rig:
        workers = variant.workers if variant.engine == "redis" else variant.then and variant.then[1]
        count = workers or available_cores()
        for machine in filter(None, (count - count // 2, count // 2)):  # two machines, so that lanes move between them
            rig.add_machine(machine)
        rig.wait_for_workers(count)
        yield rig


def _address(engine: str, rig: RedisRig | None) -> str:
    return rig.address if engine == "redis" and rig is not None else engine


def _in_this_process(spec: RunSpec, variant: RunVariant, rig: RedisRig | None) -> int:
    quiet = Console(quiet=True)
    options = {"lease": redis_faults.LEASE} if rig is not None and variant.fault else {}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(engines.make(spec.settings.engine, variant.workers, **options))
        killers: list[Tracker] = []
        if variant.fault == "kill-workers" and rig is not None:
            killers = [stack.enter_context(redis_faults.RedisFaults(rig, engine, spec.settings.iterations or 1))]
            stack.callback(engine.close)  # before the faults end, which stops a restarted server
        elif variant.fault == "kill-workers":
            killers = [_Killer(engine)]
        run.train(spec, engine=engine, trackers=killers, console=quiet)
        return engine.telemetry().lost_workers
    raise AssertionError("unreachable")


class _Killer:
    """A tracker that kills a worker in each iteration, once the first task of that iteration is done."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kill_soon()

    def write(self, metrics: MetricsRow) -> None:
        """Kill a worker in the next iteration."""
        self._kill_soon()

    def close(self) -> None:
        """Do nothing: threads are daemons."""

    def _kill_soon(self) -> None:
        threading.Thread(target=_kill_one, args=(self._engine, self._engine.telemetry().tasks), daemon=True).start()


def _kill_one(engine: Engine, tasks_before: int) -> None:
    deadline = time.monotonic() + 10
    while engine.telemetry().tasks == tasks_before and time.monotonic() < deadline:
        time.sleep(0.001)
    pids = engine.pids
    if pids:
        os.kill(pids[0], signal.SIGKILL)  # the oldest is busy, while the youngest may still be starting


def _under_mpirun(spec: RunSpec, variant: RunVariant, rig: RedisRig | None) -> int:
    """Train in a separate MPI job; with the fault, kill its last rank half-way, which restarts the job."""
    folder = RunDir(Path(spec.settings.runs) / str(spec.settings.name))
    with _training(spec) as head:
        if variant.fault:
            _wait_for_half(folder, spec.settings, head)
            os.kill(_last_rank(folder), signal.SIGKILL)
        _finish(head)
    return 1 if variant.fault else 0


def _with_killed_head(spec: RunSpec, variant: RunVariant, rig: RedisRig | None) -> int:
    """Train in a separate process, kill it half-way, and resume the run in this process."""
    folder = RunDir(Path(spec.settings.runs) / str(spec.settings.name))
    with _training(spec) as head:
        _wait_for_half(folder, spec.settings, head)
        head.kill()
    deadline = time.monotonic() + _DEADLINE
    while folder.busy() and time.monotonic() < deadline:
        time.sleep(0.005)  # only the launcher of an MPI job was killed; its ranks end soon
    if variant.then is None:
        raise AssertionError("a killed head is resumed")
    name, workers = variant.then
    if name == "mpi":
        flag = [] if workers is None else ["--workers", str(workers)]
        with _shoal(["resume", str(folder.path), "--engine", name, *flag]) as head:
            _finish(head)
    else:
        if rig is not None and name == variant.engine == "redis" and (workers or 0) > (variant.workers or 0):
            rig.add_machine((workers or 0) - (variant.workers or 0))
        changes = {"engine": _address(name, rig), "workers": workers}
        run.resume(folder.name, folder.path.parent, changes, console=Console(quiet=True))
    return 0


def _training(spec: RunSpec) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    run = [spec.algo, spec.settings.env, "--no-preset"]
    return _shoal(["train", *run, *flags(spec.settings), *flags(spec.config)])


@contextlib.contextmanager
def _shoal(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command of Shoal in a process that ends with the block."""
    command = shoal_command(*words)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        except BaseException:
            process.terminate()  # or leaving the block would wait for the end of the run
            raise


def _wait_for_half(folder: RunDir, settings: Settings, head: subprocess.Popen[str]) -> None:
    half = (settings.iterations or 2) // 2
    if half < 1:
        raise UsageError("faults half-way need at least 2 iterations: use --iterations 2 or more")
    deadline = time.monotonic() + _DEADLINE
    while max(folder.saved(), default=0) < half and time.monotonic() < deadline:
        if head.poll() is not None:
            _, errors = head.communicate()
            raise UsageError(f"the run ended before iteration {half}, where it was to be killed: {errors.strip()}")
        time.sleep(0.005)


def _finish(head: subprocess.Popen[str]) -> None:
    _, errors = head.communicate()
    if head.returncode:
        raise UsageError(f"the run ended with exit code {head.returncode}: {errors.strip()}")


def _last_rank(folder: RunDir) -> int:
    """Find the process id of a run's last rank in the process table: only mpirun knows it otherwise."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = dict(
                item.split(b"=", 1) for item in (process / "environ").read_bytes().split(b"\0") if b"=" in item
            )
        except OSError:
            continue  # it has ended, or belongs to another user
        if str(folder.path.resolve()).encode() in words and b"OMPI_COMM_WORLD_RANK" in variables:
            found[int(variables[b"OMPI_COMM_WORLD_RANK"])] = int(process.name)
    return found[max(found)]


def flags(settings: Settings | AlgorithmConfig) -> list[str]:
    """Spell settings as command-line flags, except the environment and those that are None."""
    return spelled(asdict(settings), type(settings))


def _difference(reference: VariantResult, other: VariantResult) -> str:
    """Describe the first iteration whose digests differ, with both digests; empty if none do."""
    for row, theirs in zip(reference.rows, other.rows, strict=False):
        if row["digest"] != theirs["digest"]:
            parts = [part for part, value in row["digests"].items() if theirs["digests"].get(part) != value]
            numbers = [
                f"{key}: {value!r} and {theirs.get(key)!r}"
                for key, value in row.items()
                if key.startswith(("rollout/", "train/")) and value != theirs.get(key)
            ]
            return (
                f"iteration {row['iteration']} differs between {reference.variant} ({row['digest']}) and "
                f"{other.variant} ({theirs['digest']}), in: {', '.join(parts)}. {'; '.join(numbers)}".strip()
            )
    if len(reference.rows) != len(other.rows):
        return f"{reference.variant} has {len(reference.rows)} iterations and {other.variant} has {len(other.rows)}"
    return ""


def _label(name: str, workers: int | None) -> str:
    return name if workers is None else f"{name}:{workers}"
