"""Try every engine and optional package on this machine, and report what to install for those that do not work."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shoal import __version__, engines
from shoal.base.host import available_cores
from shoal.engines import ENGINES
from shoal.engines.fingerprint import fingerprint
from shoal.errors import ShoalError
from shoal.sampling import tasks
from shoal.spmd.launching import mpirun
from shoal.testing.redis_rig import RedisRig

# package -> (a module to try, pip command)
_EXTRAS = {
    "Box2D (LunarLander, BipedalWalker)": ("Box2D", "pip install 'shoal[box2d]'"),
    "MuJoCo (HalfCheetah, Walker2d, ...)": ("mujoco", "pip install 'shoal[mujoco]'"),
    "OpenSpiel (Go)": ("pyspiel", "pip install 'shoal[go]'"),
    "Nevergrad (the algorithm nevergrad)": ("nevergrad", "pip install 'shoal[nevergrad]'"),
}


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the report."""

    what: str
    works: bool
    detail: str


def run_checks() -> list[DoctorCheck]:
    """Run all checks."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {available_cores()} cores"
    versions = ", ".join(f"{k} {v}" for k, v in fingerprint().items() if k not in ("python", "code", "canary", "shoal"))
    checks = [DoctorCheck("Shoal", True, f"{__version__} on {system}"), DoctorCheck("numerics", True, f"{versions}")]
    checks += [_engine(name) for name in ENGINES]
    checks += [_learner()]
    checks += [_extra(what, module, command) for what, (module, command) in _EXTRAS.items()]
    return checks


def _engine(name: str) -> DoctorCheck:
    if name == "mpi":
        return _mpi()
    begun = time.perf_counter()
    try:
        with _place(name) as (place, workers), engines.make(place, workers) as engine:
            answers = set(engine.map(tasks.canary, range(2 * engine.workers)))
            seconds = time.perf_counter() - begun
            return DoctorCheck(
                f"engine {name}",
                True,
                f"{engine.workers} worker(s) in {seconds:.2f} s, canary {', '.join(answers)}",
            )
    except Exception as error:  # the report shows any error
        return DoctorCheck(f"engine {name}", False, str(error))


@contextlib.contextmanager
def _place(name: str) -> Iterator[tuple[str, int | None]]:
    """Yield the address of an engine and its number of workers; for Redis, of a temporary server with one worker."""
    if name != "redis":
        yield name, None
        return
    with RedisRig() as rig:
        rig.add_machine(1)
        rig.wait_for_workers(1)
        yield rig.address, 1


def _mpi() -> DoctorCheck:
    """Start a job of two ranks: this process cannot become a rank."""
    imports = "import shoal; from shoal.sampling.tasks import canary"
    script = f"{imports}\nwith shoal.engine('mpi') as engine: print(engine.map(canary, [0])[0])"
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            [*mpirun(2), sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
    except (ShoalError, OSError, subprocess.TimeoutExpired) as error:
        return DoctorCheck("engine mpi", False, str(error))
    said = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
    detail = said[-1] if said else f"exit code {done.returncode}"
    if done.returncode:
        return DoctorCheck("engine mpi", False, detail)
    return DoctorCheck("engine mpi", True, f"1 worker(s) in {time.perf_counter() - begun:.2f} s, canary {detail}")


def _learner() -> DoctorCheck:
    os.environ.setdefault("NPROC", "1")
    try:
        import jax

        device = jax.devices()[0]
        return DoctorCheck(
            "learner", True, f"jax {jax.__version__} on {device.platform}, {os.environ['NPROC']} thread(s)"
        )
    except Exception as error:
        return DoctorCheck("learner", False, f"{error}. Try: pip install -U jax jaxlib")


def _extra(what: str, module: str, command: str) -> DoctorCheck:
    try:
        importlib.import_module(module)
    except ImportError:
        return DoctorCheck(what, False, f"not installed; run: {command}")
    return DoctorCheck(what, True, "installed")
