"""The process of one run in a comparison: it learns with an engine that is lent to it, and says how far it is.

Each line of its output is progress, as JSON, or something to read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.engines.proxy import EngineProxy
from shoal.errors import ShoalError, Stopped, problem_list
from shoal.runs import run
from shoal.runs.folder import RunDir
from shoal.runs.metrics import MetricsRow
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec, make_config

_EVERY = 0.5  # seconds between words on progress


class _Progress:
    """A tracker that says how far the run is."""

    def __init__(self) -> None:
        self._next = 0.0

    def write(self, metrics: MetricsRow) -> None:
        """Say it, if the last word is old enough."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY
            known = {"steps": metrics["time/total_timesteps"], "return": metrics.get("rollout/ep_rew_mean")}
            with contextlib.suppress(BrokenPipeError):  # nobody listens any more, which the engine is about to say
                print(json.dumps({"iteration": metrics["iteration"], **known}), flush=True)

    def close(self) -> None:
        """Nothing is kept."""


def train_run(job: dict[str, Any], engine: EngineProxy) -> None:
    """Begin a run, or go on with it, up to its goal."""
    settings = Settings(**job["settings"])
    found = RunDir(Path(settings.runs) / str(settings.name))
    options: dict[str, Any] = {"engine": engine, "trackers": [_Progress()], "console": Console(quiet=True)}
    if found.config_file.is_file():
        changes = {"engine": settings.engine, "workers": settings.workers}
        run.resume(found.name, found.path.parent, changes, **options)
    else:
        run.train(RunSpec(job["algo"], settings, make_config(job["algo"], job["config"])), **options)


def main() -> None:
    """Arguments: the number of the inherited socket, and the job as JSON.

    When the owner dies, the socket closes, which ends the run like any fault of an engine: saved.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    job = json.loads(sys.argv[2])
    sys.path[:] = job["path"]
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        with EngineProxy(connection, job["workers"]) as engine:
            train_run(job, engine)
    except Stopped as stop:
        sys.exit(128 + stop.number)
    except ShoalError as error:
        for line in [*problem_list(error), *getattr(error, "__notes__", [])]:
            print(line)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
