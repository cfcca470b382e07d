"""Commands to suggest at the end of a message, ready to copy into the user's shell."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from shoal.runs.flags import spelled
from shoal.runs.folder import RunDir
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec

_ELSEWHERE = ("env", "engine", "workers", "engine_options", "runs", "name")  # settings that do not change the result


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


def train_command(spec: RunSpec) -> str:
    """Return the command that trains a run with the same settings, whatever presets there are."""
    values: dict[str, Any] = {}
    for given, default in ((spec.settings, Settings(spec.settings.env)), (spec.config, type(spec.config)())):
        for field in dataclasses.fields(given):
            value = getattr(given, field.name)
            if field.name not in _ELSEWHERE and value != getattr(default, field.name):
                values[field.name] = value
    flags = spelled(values, Settings, type(spec.config))
    return shlex.join([program(), "train", spec.algo, spec.settings.env, "--no-preset", *flags])
