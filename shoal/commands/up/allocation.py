"""What the launcher and the scheduler say about this process."""

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
from shoal.spmd.launching import launched_rank

# Variables that together are equal for all ranks of one start, and differ between starts.
_JOBS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
    ("ALPS_APP_ID",),
    ("PALS_APID",),
    ("PBS_JOBID",),
)
_CPUS = ("SLURM_CPUS_ON_NODE", "PBS_NUM_PPN", "NCPUS")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Allocation:
    """This rank's place in the job."""

    launcher: str
    """Empty if nothing but this process was started."""
    rank: int
    size: int
    job: str
    """Names this start: equal on all of its ranks, and on no other that runs now."""
    cores: tuple[int, ...]
    """Those of this machine that this rank may use, by number."""
    limit: int | None
    """How many CPUs of this machine belong to the job, if the scheduler says."""

    @classmethod
    def read(cls, variables: Mapping[str, str], ranks: int | None = None, job: str | None = None) -> Allocation:
        """From the environment; `ranks` and `job` say what it does not."""
        here = launched_rank(variables) or _pbs(variables)
        launcher, rank, size = ("", 0, 1) if here is None else here if isinstance(here, tuple) else (
            here.launcher, here.rank, here.size)  # fmt: skip
        problems = []
        if ranks is not None and ranks < 1:
            problems.append(f"ranks must be at least 1, not {ranks}")
        elif size is None and ranks is None:
            problems.append(f"{launcher} does not say how many ranks it started. Say so with --ranks N")
        elif None not in (size, ranks) and size != ranks and launcher:
            problems.append(f"{launcher} started {size} ranks, not --ranks {ranks}")
        names = [found for names in _JOBS if (found := [variables[name] for name in names if name in variables])]
        if job is None and launcher and not names:
            problems.append(
                f"{launcher} gives this job no name that all ranks know. Make one up that was not used before: "
                f"--job {time.strftime('%m%d-%H%M')}"
            )
        if problems:
            raise UsageError(problems)
        name = job or ("-".join(names[0]) if launcher else f"{socket.gethostname()}-{os.getpid()}")
        told = next((int(variables[one]) for one in _CPUS if variables.get(one, "").isdigit()), None)
        job = re.sub(r"[^\w.-]", "-", name)
        return cls(launcher, rank, size or ranks or 1, job, _cores(variables), told)


def _pbs(variables: Mapping[str, str]) -> tuple[str, int, int] | None:
    """`pbsdsh -u` starts one process on each machine of the node file, and does not number them."""
    file = variables.get("PBS_NODEFILE")
    if file is None or "PBS_TASKNUM" not in variables:
        return None
    hosts = list(dict.fromkeys(line.split(".")[0] for line in Path(file).read_text().split()))
    mine = variables.get("HOSTNAME") or socket.gethostname()
    if mine.split(".")[0] not in hosts:
        raise UsageError(f"this machine ({mine}) is not in the node file {file}: {', '.join(hosts)}")
    return "pbsdsh", hosts.index(mine.split(".")[0]), len(hosts)


def _cores(variables: Mapping[str, str]) -> tuple[int, ...]:
    """Cores that this rank may use."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    if "SLURM_JOB_ID" not in variables:
        # mpirun may have bound this rank to one core, and Ray would be bound with it. What a container or a batch
        # system allows is in a cgroup, which this cannot leave.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


def time_left(variables: Mapping[str, str]) -> float | None:
    """Seconds until the scheduler ends the job, if it says."""
    if variables.get("SLURM_JOB_END_TIME", "").isdigit():
        return int(variables["SLURM_JOB_END_TIME"]) - time.time()
    if variables.get("PBS_WALLTIME", "").isdigit():
        return float(variables["PBS_WALLTIME"])
    if "SLURM_JOB_ID" in variables and shutil.which("squeue"):  # older versions set no variable
        command = ["squeue", "--noheader", "--format=%L", f"--jobs={variables['SLURM_JOB_ID']}"]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
        return duration(f"00:{said}" if said.count(":") == 1 else said) if ":" in said else None
    return None


def duration(text: str) -> float:
    """Seconds of `HH:MM:SS`, `D-HH:MM:SS` or a number with s, m, h or d."""
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d?):(\d\d)", text)
    if clock:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if number is None:
        raise UsageError(f"{text!r} is not a time such as 12:00:00, 1-00:00:00, 90m or 2h")
    return float(number[1]) * _UNITS[number[2]]
