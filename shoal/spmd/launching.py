"""Start the ranks of a script with `launch`, or recognise that a launcher such as mpirun or srun has started them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shoal.base.host import BLAS_THREADS, available_cores
from shoal.errors import MissingExtra, UsageError

# Launcher, its variable for the rank, its variable for the number of ranks. Those that set the number come first.
_LAUNCHERS = (
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE"),
    ("mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    # Not SLURM_NTASKS: a batch script has it too, and is not a rank.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("aprun", "ALPS_APP_PE", ""),
    ("PALS", "PALS_RANKID", ""),
    ("PMIx", "PMIX_RANK", ""),
)

# Variables for the rank within its host and for the number of ranks there. Those of srun come last, in `local_place`.
_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)

# XLA (JAX) reads NPROC.
_THREADS = (*BLAS_THREADS, "NPROC")

INSTALL = "pip install 'shoal[mpi]'"
GPUS = "SHOAL_SPMD_GPUS"


@dataclass(frozen=True)
class LaunchedRank:
    """This process as its launcher sees it. `size` is None if the launcher does not set the number of ranks."""

    launcher: str
    rank: int
    size: int | None


def launched_rank(variables: Mapping[str, str]) -> LaunchedRank | None:
    """Detect from environment variables which launcher started this process as a rank; None if none did."""
    for launcher, rank, size in _LAUNCHERS:
        if rank not in variables or (size and size not in variables):
            continue
        if not size:
            return LaunchedRank(launcher, int(variables[rank]), None)
        if launcher == "srun" and int(variables[size]) == 1:
            continue  # a job with a single task may call `launch`
        return LaunchedRank(launcher, int(variables[rank]), int(variables[size]))
    return None


@dataclass(frozen=True)
class LocalPlace:
    """Rank of this process among those on its host. With `gpus_bound`, the launcher assigns GPUs to each."""

    rank: int
    size: int
    gpus_bound: bool = False


def local_place(variables: Mapping[str, str]) -> LocalPlace | None:
    """Read this rank's number on its host from environment variables; None if the launcher does not set it."""
    by_srun = _is_task_of_srun(variables)
    bound = by_srun and (
        "SLURM_GPUS_PER_TASK" in variables
        or "gpu" in variables.get("SLURM_TRES_PER_TASK", "")
        or variables.get("SLURM_GPU_BIND", "none") != "none"
    )
    places = [(variables.get(rank, ""), variables.get(size, "")) for rank, size in _LOCAL]
    if by_srun:
        places.append((variables.get("SLURM_LOCALID", ""), _tasks_on_this_node(variables)))
    for rank, size in places:
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return LocalPlace(int(rank), int(size), bound)
    return None


def _is_task_of_srun(variables: Mapping[str, str]) -> bool:
    # Not a rank of another launcher: mpirun starts its daemons with srun, and its ranks inherit their numbers.
    here = launched_rank(variables)
    numbers = (variables.get("SLURM_PROCID"), variables.get("SLURM_STEP_NUM_TASKS"))
    return here is not None and numbers == (str(here.rank), str(here.size))


def _tasks_on_this_node(variables: Mapping[str, str]) -> str:
    sizes: list[str] = []  # of each node; Slurm writes 4(x2),3 for 4, 4, 3
    for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", "")):
        sizes += [size] * int(times or 1)
    node = variables.get("SLURM_NODEID", "")
    return sizes[int(node)] if node.isdecimal() and int(node) < len(sizes) else ""


def divides_gpus(variables: Mapping[str, str]) -> bool:
    """Test whether Shoal divides the GPUs of a host among its ranks; refuse a value of GPUS that it does not know."""
    wanted = variables.get(GPUS, "share")
    if wanted not in ("share", "all"):
        raise UsageError(
            f"{GPUS}={wanted!r} is neither share (the default: divide the GPUs of a host among its ranks) nor all "
            "(leave them as they are)"
        )
    return wanted == "share"


def without_rank(variables: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables that would make a child process look like a rank."""
    own = {name for _, *names in _LAUNCHERS for name in names}
    return {
        name: value
        for name, value in variables.items()
        if name not in own and not name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))
    }


def launch(n: int) -> None:
    """Run this script again as `n` processes under mpirun, and exit with mpirun's exit code.

    Call it first, before any work: it replaces this process. Inside the `n` processes, or in a script that was started
    with mpirun, srun or aprun, it starts MPI and chooses the GPUs of this rank (docs/spmd.md). Otherwise `launch(1)`
    does nothing. Each process gets an equal share of the cores as threads, unless OMP_NUM_THREADS or a similar variable
    is set.
    """
    if n < 1:
        raise UsageError(f"launch({n}): the number of processes must be 1 or more")
    if launched_rank(os.environ) is not None:
        from shoal.spmd.world import world

        world()
        return
    if n == 1:
        return
    divides_gpus(os.environ)  # refuses a wrong value once, not on every rank
    script = sys.orig_argv[1:]
    if "-c" not in script and (getattr(sys.modules["__main__"], "__file__", None) or "<stdin>").startswith("<"):
        raise UsageError(
            f"launch({n}) runs a script again from its start, but this code comes from an interactive session or "
            "standard input. Put it into a file and run: python script.py"
        )
    _replace_process([*mpirun(n), sys.executable, *script], _variables(n))


def mpirun(n: int) -> list[str]:
    """Build the start of a command line that runs the rest of it as `n` processes."""
    found = _find_mpirun()
    if found is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpirun" if found is None else "mpi4py"
        raise MissingExtra(
            f"running {n} processes under MPI needs {missing}, and {missing} was not found. Install it: {INSTALL}"
        )
    return _command(found, n)


def _find_mpirun() -> str | None:
    # Look next to the interpreter first: the wheel installs it there, and a virtualenv need not be active.
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("mpirun", path=folders) or shutil.which("mpiexec", path=folders)


def _command(mpirun: str, n: int) -> list[str]:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    command = [mpirun, "-n", str(n)]
    if "Open MPI" not in version and "OpenRTE" not in version:
        return command
    # By default Open MPI binds each process to one core, and refuses more processes than cores and root (containers).
    command += ["--bind-to", "none", "--oversubscribe"]
    return [*command, "--allow-run-as-root"] if os.geteuid() == 0 else command


def _variables(n: int) -> dict[str, str]:
    share = str(max(1, available_cores() // n))
    return dict.fromkeys(_THREADS, share) | dict(os.environ)


def _replace_process(command: list[str], variables: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, variables)  # noqa: S606  deliberately without a shell
