"""The command `up`: a Ray cluster inside of an allocation, for as long as one command runs."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from shoal.base import validation
from shoal.cli.parsing import parse
from shoal.errors import MissingExtra, UsageError


@dataclass(frozen=True)
class Up:
    """Start Ray on every machine of this job, run COMMAND once, on the first, and stop everything.

    In COMMAND, {address} stands for the address of the cluster, which is also in RAY_ADDRESS. Its exit code is the
    exit code.

        mpirun -n 4 shoal up -- shoal train trpo Walker2d-v5 --engine ray
        srun shoal up -- python train.py --address {address}
        shoal up --print-script slurm -- python train.py
    """

    folder: str = "shoal-up"
    """Folder that all machines see, for logs, and for ranks to find each other."""
    deadline: float = 120.0
    """Seconds for all ranks to come, for Ray to start, and for all nodes to join; each."""
    port: int = 0
    """Port of the cluster; a free one unless told."""
    grace: float = 30.0
    """Seconds for COMMAND to end after a signal; then it is killed."""
    walltime: str | None = None
    """Time of the job: 12:00:00, 90m or 2h. Unless told, what the scheduler says. Shortly before its end COMMAND gets a
    SIGTERM, by which Shoal's own commands save; the exit code is 75: start the job again."""
    margin: float = 120.0
    """How many seconds before that end."""
    ranks: int | None = None
    """Number of ranks, where the launcher does not say."""
    job: str | None = None
    """A name for this start that all ranks know, where the launcher gives none."""
    print_script: str | None = None
    """Print a batch script for slurm or pbs that does this, and do nothing else."""
    nodes: int = 2
    """Machines that the script asks for."""

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        found = validation.problems(
            self, at_least_one=("nodes",), above_zero=("deadline",), not_negative=("grace", "margin")
        )
        if not 0 <= self.port < 2**16:
            found.append(f"port must be in 0..65535, not {self.port}")
        return found


def up(words: list[str]) -> int:
    """Bring a cluster up, run a command, take it down."""
    at = words.index("--") if "--" in words else len(words)
    wanted, driver = parse(Up, words[:at], "up"), words[at + 1 :]
    from shoal.commands.up.allocation import Allocation, parse_duration, time_left
    from shoal.commands.up.leader import REQUEUE, JobOptions, lead
    from shoal.commands.up.script import script

    problems = wanted.problems()
    if not driver:
        problems.append("there is no command to run. Put it behind two dashes: shoal up -- python train.py")
    seconds = None
    try:
        seconds = None if wanted.walltime is None else parse_duration(wanted.walltime)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    if wanted.print_script is not None:
        print(script(wanted.print_script, driver, wanted.nodes, seconds or 3600.0, REQUEUE), end="")
        return 0
    if importlib.util.find_spec("ray") is None:
        raise MissingExtra("`shoal up` needs Ray. To install it, type: pip install 'shoal[ray]'")
    allocation = Allocation.read(os.environ, wanted.ranks, wanted.job)
    folder = Path(wanted.folder).absolute() / allocation.job
    if allocation.rank:
        from shoal.commands.up.follower import follow

        return follow(allocation, folder, wanted.deadline)
    seconds = time_left(os.environ) if seconds is None else seconds
    until = None if seconds is None else max(seconds - wanted.margin, 0.0)
    return lead(allocation, JobOptions(driver, folder, wanted.deadline, wanted.port, wanted.grace, until))
