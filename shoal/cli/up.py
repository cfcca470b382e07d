"""The command `up`: a Ray cluster inside an allocation, for as long as one command runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.base import validation
from shoal.cli.parsing import parse
from shoal.errors import UsageError


@dataclass(frozen=True)
class UpArgs:
    """Start Ray on every machine of this job, run COMMAND once on the first machine, and stop everything.

    In COMMAND, {address} is replaced by the address of the cluster, which is also in RAY_ADDRESS. The exit code is
    that of COMMAND.

        mpirun -n 4 shoal up -- shoal train trpo Walker2d-v5 --engine ray
        srun shoal up -- python train.py --address {address}
        shoal up --print-script slurm -- python train.py
    """

    folder: str = "shoal-up"
    """Folder shared by all machines, for logs and for the ranks to find each other."""
    deadline: float = 120.0
    """Seconds to wait for all ranks to connect, for Ray to start, and for all nodes to join (each)."""
    port: int = 0
    """Port of the cluster; 0 is any free one."""
    grace: float = 30.0
    """Seconds COMMAND has to end after a signal before it is killed."""
    walltime: str | None = None
    """Time limit of the job: 12:00:00, 90m or 2h (default: the scheduler's). Shortly before it, COMMAND gets a SIGTERM,
    on which Shoal's commands save; the exit code is then 75: start the job again to continue."""
    margin: float = 120.0
    """Seconds between that SIGTERM and the time limit."""
    ranks: int | None = None
    """Number of ranks (default: from the launcher; aprun does not set it)."""
    job: str | None = None
    """Unique name of this job, the same on all ranks (default: from the launcher)."""
    print_script: str | None = None
    """Print a batch script for slurm or pbs that runs this command, and exit."""
    nodes: int = 2
    """Number of machines that the batch script requests."""

    def problems(self) -> list[str]:
        """List everything that is wrong with the values."""
        found = validation.field_problems(
            self, at_least_one=("nodes",), above_zero=("deadline",), not_negative=("grace", "margin")
        )
        if not 0 <= self.port < 2**16:
            found.append(f"port must be in 0..65535, not {self.port}")
        return found


def up(words: list[str]) -> int:
    """Run a command on a Ray cluster that exists only while it runs."""
    at = words.index("--") if "--" in words else len(words)
    args, driver = parse(UpArgs, words[:at], "up"), words[at + 1 :]
    from shoal.commands.up.allocation import parse_duration
    from shoal.commands.up.job import run_rank
    from shoal.commands.up.leader import REQUEUE
    from shoal.commands.up.script import batch_script

    problems = args.problems()
    if not driver:
        problems.append("there is no command to run. Put it after two dashes: shoal up -- python train.py")
    walltime = None
    try:
        walltime = None if args.walltime is None else parse_duration(args.walltime)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    if args.print_script is not None:
        print(batch_script(args.print_script, driver, args.nodes, walltime or 3600.0, REQUEUE), end="")
        return 0
    return run_rank(
        driver,
        folder=Path(args.folder),
        deadline=args.deadline,
        port=args.port,
        grace=args.grace,
        walltime=walltime,
        margin=args.margin,
        ranks=args.ranks,
        job=args.job,
    )
