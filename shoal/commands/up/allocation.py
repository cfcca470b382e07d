"""This process's place in its job, as the launcher and the scheduler describe it in environment variables."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError
from shoal.spmd.launching import LaunchedRank, launched_rank

_JOB_VARIABLES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
    ("ALPS_APP_ID",),
    ("PALS_APID",),
    ("PBS_JOBID",),
)
"""Per launcher, variables that together are equal on all ranks of one start and differ between starts."""
_CPU_VARIABLES = ("SLURM_CPUS_ON_NODE", "PBS_NUM_PPN", "NCPUS")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Allocation:
    """This rank, its job, and the cores it may use."""

    launcher: str
    """Empty if no launcher started this process."""
    rank: int
    size: int
    job: str
    """Name of this start, equal on all its ranks and unique among the jobs that are running."""
    cores: tuple[int, ...]
    """Numbers of the cores of this machine that this rank may use."""
    limit: int | None
    """Number of this machine's CPUs that belong to the job; None if the scheduler does not set it."""

    @classmethod
    def read(cls, variables: Mapping[str, str], ranks: int | None = None, job: str | None = None) -> Allocation:
        """Read the environment. `ranks` and `job` supply what the launcher does not set."""
        here = launched_rank(variables) or _place_under_pbsdsh(variables) or LaunchedRank("", 0, 1)
        problems = _size_problems(here, ranks)
        name = job or _job_name(here.launcher, variables)
        if not name:
            problems.append(
                f"{here.launcher} sets no job name that all ranks know. Choose one that was not used before: "
                f"--job {time.strftime('%m%d-%H%M')}"
            )
        if problems:
            raise UsageError(problems)
        return cls(
            launcher=here.launcher,
            rank=here.rank,
            size=here.size or ranks or 1,
            job=re.sub(r"[^\w.-]", "-", name),
            cores=_cores(variables),
            limit=next((int(variables[one]) for one in _CPU_VARIABLES if variables.get(one, "").isdigit()), None),
        )


def _size_problems(here: LaunchedRank, ranks: int | None) -> list[str]:
    """Compare the launcher's number of ranks with the user's."""
    if ranks is not None and ranks < 1:
        return [f"ranks must be at least 1, not {ranks}"]
    if ranks is None and here.size is None:
        return [f"{here.launcher} does not set the number of ranks. Give it: --ranks N"]
    if ranks is not None and here.launcher and here.size not in (None, ranks):
        return [f"{here.launcher} started {here.size} ranks, not --ranks {ranks}"]
    return []


def _job_name(launcher: str, variables: Mapping[str, str]) -> str:
    """Name this start of the job; empty if the launcher sets nothing to name it by."""
    if not launcher:
        return f"{socket.gethostname()}-{os.getpid()}"
    for names in _JOB_VARIABLES:
        if values := [variables[name] for name in names if name in variables]:
            return "-".join(values)
    return ""


def _place_under_pbsdsh(variables: Mapping[str, str]) -> LaunchedRank | None:
    """Number this rank by the node file: `pbsdsh -u` starts one process per machine and does not number them."""
    file = variables.get("PBS_NODEFILE")
    if file is None or "PBS_TASKNUM" not in variables:
        return None
    hosts = list(dict.fromkeys(line.split(".")[0] for line in Path(file).read_text().split()))
    here = variables.get("HOSTNAME") or socket.gethostname()
    if here.split(".")[0] not in hosts:
        raise UsageError(f"this machine ({here}) is not in the node file {file}: {', '.join(hosts)}")
    return LaunchedRank("pbsdsh", hosts.index(here.split(".")[0]), len(hosts))


def _cores(variables: Mapping[str, str]) -> tuple[int, ...]:
    """Find the cores that this rank may use, after undoing a launcher's binding."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    if "SLURM_JOB_ID" not in variables:
        # mpirun may have bound this rank, and so Ray, to one core. The limits of a container or a batch system are in
        # a cgroup, which this call cannot exceed.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


def time_left(variables: Mapping[str, str]) -> float | None:
    """Seconds until the scheduler ends the job; None if it sets no limit."""
    if variables.get("SLURM_JOB_END_TIME", "").isdigit():
        return int(variables["SLURM_JOB_END_TIME"]) - time.time()
    if variables.get("PBS_WALLTIME", "").isdigit():
        return float(variables["PBS_WALLTIME"])
    if "SLURM_JOB_ID" in variables and shutil.which("squeue"):  # older versions of Slurm set no variable
        command = ["squeue", "--noheader", "--format=%L", f"--jobs={variables['SLURM_JOB_ID']}"]
        left = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
        return parse_duration(f"00:{left}" if left.count(":") == 1 else left) if ":" in left else None
    return None


def parse_duration(text: str) -> float:
    """Seconds of `HH:MM:SS`, `D-HH:MM:SS` or a number with s, m, h or d."""
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d?):(\d\d)", text)
    if clock:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if number is None:
        raise UsageError(f"{text!r} is not a time such as 12:00:00, 1-00:00:00, 90m or 2h")
    return float(number[1]) * _UNITS[number[2]]
