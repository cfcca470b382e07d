"""The planned runs of a campaign: ordinary runs in one folder, with names that the same command finds again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.runs.folder import RunDir
from shoal.runs.metrics import MetricsRow
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec
from shoal.sampling.tasks import KEEP_RUNS

TASK = ("env", "env_kwargs", "wrap", "max_episode_steps", "vector")
"""Settings of a run that make its task."""
RESULT = (*TASK, "steps", "iterations", "seed", "step_limit", "recreate_after", "device")
"""Settings of a run that its result depends on."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a campaign, which may exist already."""

    label: str
    """The runs with one label differ only in their seed."""
    spec: RunSpec
    preset: bool = False
    """Whether its settings are based on a preset."""

    @property
    def folder(self) -> RunDir:
        """Folder of the run, which may not exist yet."""
        settings = self.spec.settings
        return RunDir(Path(settings.runs) / str(settings.name))

    def __str__(self) -> str:
        return f"{self.label} seed {self.spec.settings.seed}"

    @property
    def finished(self) -> bool:
        """Whether the run has reached its goal and saved that iteration."""
        if not self.folder.config_file.is_file():
            return False
        rows, saved = self.folder.metrics(), self.folder.saved()
        last = next((row for row in rows if saved and row["iteration"] == saved[0]), None)
        return last is not None and self.spec.settings.goal.reached(last)

    def row_at(self, steps: int) -> MetricsRow | None:
        """Return the first row with at least this many environment steps; None if the run has not come that far."""
        return next((row for row in self.folder.metrics() if row["time/total_timesteps"] >= steps), None)

    def ends_before(self, steps: int | None) -> bool:
        """Test whether the run is finished, and reached its goal no later than at a pause after this many steps."""
        row = None if steps is None else self.row_at(steps)
        return (row is None or self.spec.settings.goal.reached(row)) and self.finished

    def stands(self, steps: int | None) -> bool:
        """Test whether there is nothing to train up to a pause after this many steps, or up to the goal."""
        row = None if steps is None else self.row_at(steps)
        return self.finished if row is None or self.spec.settings.goal.reached(row) else True


def at_once_problems(at_once: int | None, engine: str) -> list[str]:
    """Describe what is wrong with a number of runs at once."""
    found = []
    if at_once is not None and at_once < 1:
        found.append(f"at_once must be at least 1, not {at_once}")
    if at_once is not None and at_once > KEEP_RUNS:
        found.append(f"at_once must be at most {KEEP_RUNS}, not {at_once}: workers hold no more runs")
    if engine == "serial" and at_once not in (None, 1):
        found.append(f"the serial engine has one worker; it cannot serve {at_once} runs at once")
    return found


def runs_at_once(at_once: int | None, engine: str, workers: int, runs: int) -> int:
    """Return how many runs train at the same time."""
    if engine == "serial":
        return 1
    return min(at_once or workers + 1, runs, KEEP_RUNS)


def other_settings(planned: Sequence[PlannedRun]) -> list[str]:
    """Describe existing runs that were made with settings that give another result."""
    found: dict[str, list[str]] = {}
    for run in planned:
        if run.folder.config_file.is_file() and (differs := _difference(run)):
            found.setdefault(differs, []).append(run.folder.name)
    return [
        f"{', '.join(names)} in {planned[0].spec.settings.runs}: made with other settings ({differs}). "
        f"Use the same settings to continue, or another --name to start again"
        for differs, names in found.items()
    ]


def _difference(run: PlannedRun) -> str:
    record, spec = run.folder.record(), run.spec
    then = {"algorithm": record["algo"]} | _results(Settings(**record["settings"])) | record["config"]
    now = {"algorithm": spec.algo} | _results(spec.settings) | asdict(spec.config)
    if spec.settings.learner_threads is not None:  # otherwise the network decides
        then["learner_threads"] = record["settings"].get("learner_threads")
        now["learner_threads"] = spec.settings.learner_threads
    now = json.loads(json.dumps(now))
    then = json.loads(json.dumps(then))
    differs = [key for key in sorted(then | now) if then.get(key) != now.get(key)]
    return "; ".join(f"{key} {then.get(key)} then, {now.get(key)} now" for key in differs)


def _results(settings: Settings) -> dict[str, Any]:
    return {key: getattr(settings, key) for key in RESULT}
