"""This rank's part of a job."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from shoal.commands.up.allocation import Allocation, time_left
from shoal.commands.up.follower import follow
from shoal.commands.up.leader import JobOptions, lead
from shoal.engines.ray.session import INSTALL
from shoal.errors import MissingExtra


def run_rank(
    driver: Sequence[str],
    *,
    folder: Path,
    deadline: float,
    port: int,
    grace: float,
    walltime: float | None,
    margin: float,
    ranks: int | None,
    job: str | None,
) -> int:
    """Lead the job on rank 0, follow on all others, and return the exit code.

    The driver is stopped `margin` seconds before the end of `walltime` (default: the scheduler's time limit).
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingExtra(f"`shoal up` needs Ray. To install it, run: {INSTALL}")
    allocation = Allocation.read(os.environ, ranks, job)
    shared = folder.absolute() / allocation.job
    if allocation.rank:
        return follow(allocation, shared, deadline)
    seconds = time_left(os.environ) if walltime is None else walltime
    stop_after = None if seconds is None else max(seconds - margin, 0.0)
    return lead(allocation, JobOptions(driver, shared, deadline, port, grace, stop_after))
