"""The process of one run of a campaign: trains on the owner's engine and prints its progress.

Each line of its output is progress, as JSON, or a message for the user.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shoal.engines.proxy import EngineProxy
from shoal.errors import ShoalError, Stopped, problem_list
from shoal.runs import run
from shoal.runs.folder import RunDir
from shoal.runs.metrics import MetricsRow
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec, make_config

if TYPE_CHECKING:
    from shoal.commands.campaign.heads import CampaignHeadRecord

_EVERY = 0.5  # seconds between lines of progress


class _Progress:
    """A tracker that prints the progress of the run."""

    def __init__(self) -> None:
        self._next = 0.0

    def write(self, metrics: MetricsRow) -> None:
        """Print a line, unless the last one is recent."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY
            known = {"steps": metrics["time/total_timesteps"], "return": metrics.get("rollout/ep_rew_mean")}
            with contextlib.suppress(BrokenPipeError):  # the owner is gone, which the engine is about to report
                print(json.dumps({"iteration": metrics["iteration"], **known}), flush=True)

    def close(self) -> None:
        """Do nothing: no file is open."""


def train_run(record: CampaignHeadRecord, engine: EngineProxy) -> None:
    """Start or resume a run and train it to its goal or its pause."""
    settings = Settings(**record["settings"])
    found = RunDir(Path(settings.runs) / str(settings.name))
    trackers, quiet, pause = [_Progress()], Console(quiet=True), record["pause"]
    if found.config_file.is_file():
        changes = {"engine": settings.engine, "workers": settings.workers}
        run.resume(found.name, found.path.parent, changes, engine=engine, trackers=trackers, console=quiet, pause=pause)
    else:
        spec = RunSpec(record["algo"], settings, make_config(record["algo"], record["config"]))
        run.train(spec, engine=engine, trackers=trackers, console=quiet, pause=pause)


def main() -> None:
    """Train the run of a `CampaignHeadRecord`. Arguments: the number of the inherited socket, and the record as JSON.

    When the owner dies, the socket closes, which ends the run like any error of an engine: it is saved.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    record: CampaignHeadRecord = json.loads(sys.argv[2])
    sys.path[:] = record["path"]
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        with EngineProxy(connection, record["workers"]) as engine:
            train_run(record, engine)
    except Stopped as stop:
        sys.exit(128 + stop.number)
    except ShoalError as error:
        for line in [*problem_list(error), *getattr(error, "__notes__", [])]:
            print(line)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
