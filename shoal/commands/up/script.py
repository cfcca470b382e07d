"""Batch scripts that run a command with `shoal up`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import UsageError

SCHEDULERS = ("slurm", "pbs")

_SLURM = """\
#!/bin/bash
#SBATCH --job-name=shoal
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time={walltime}
#SBATCH --requeue
#SBATCH --output=shoal-%j.out
# Submit with: sbatch shoal.sh
# One rank per machine, with all of its cores.
srun --cpu-bind=none {shoal} up -- {driver}
code=$?
# {requeue}: the time was nearly up, and the driver has saved. The requeued job continues from there.
if [ $code -eq {requeue} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""

_PBS = """\
#!/bin/bash
#PBS -N shoal
#PBS -l select={nodes}:ncpus=32
#PBS -l place=scatter:excl
#PBS -l walltime={walltime}
#PBS -r y
#PBS -j oe
# Submit with: qsub shoal.sh   (ncpus above: the cores of one of your machines)
cd "$PBS_O_WORKDIR" || exit 2
# pbsdsh starts one process per machine, with hardly any environment.
pbsdsh -u -- /bin/bash -c "cd '$PBS_O_WORKDIR' && \\
  export PATH='$PATH' PBS_JOBID='$PBS_JOBID' PBS_NODEFILE='$PBS_NODEFILE' NCPUS='$NCPUS' && \\
  exec {shoal} up --walltime {walltime} -- {driver}"
code=$?
# {requeue}: the time was nearly up, and the driver has saved.
if [ $code -eq {requeue} ]; then echo "To continue, submit this script again."; fi
exit $code
"""


def batch_script(scheduler: str, driver: Sequence[str], nodes: int, seconds: float, requeue: int) -> str:
    """Write a script for `sbatch` or `qsub`."""
    if scheduler not in SCHEDULERS:
        raise UsageError(f"there is no script for {scheduler!r}, only for {' and '.join(SCHEDULERS)}")
    installed = Path(sys.executable).parent / "shoal"
    shoal = str(installed) if installed.exists() else f"{sys.executable} -m shoal"
    words = shlex.join(driver)
    if scheduler == "pbs":  # inside double quotes
        words = words.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    minutes, rest = divmod(int(seconds), 60)
    walltime = f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
    template = _SLURM if scheduler == "slurm" else _PBS
    return template.format(nodes=nodes, walltime=walltime, shoal=shoal, driver=words, requeue=requeue)
