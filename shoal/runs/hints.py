"""Commands to suggest at the end of a message, ready to copy into the user's shell."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from shoal.runs.folder import RunDir


def resume_command(run: RunDir) -> str:
    """Return the command that continues a run."""
    return f"{program()} resume {run.name}{runs_flag(run)}"


def program() -> str:
    """Return how to call Shoal from the user's shell: it may be installed in a virtualenv that is not active."""
    started_as = Path(sys.argv[0])
    return str(started_as) if started_as.name == "shoal" and shutil.which("shoal") is None else "shoal"


def runs_flag(run: RunDir) -> str:
    """Return the flag that names the folder of a run, unless it is the default."""
    return "" if run.path.parent == Path("runs") else f" --runs {run.path.parent}"
