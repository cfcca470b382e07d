"""The loop of a run: takes the steps of an algorithm, tracks and saves them, and stops at the goal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.algos.base import Step
from shoal.base import signals
from shoal.engines.base import Engine
from shoal.errors import DiskFault
from shoal.runs.evaluator import Evaluator
from shoal.runs.folder import RunDir
from shoal.runs.goal import Goal
from shoal.runs.hints import resume_command
from shoal.runs.meter import Meter
from shoal.runs.metrics import MetricsRow
from shoal.runs.settings import Settings
from shoal.runs.track import Tracker
from shoal.runs.usage import Usage

log = logging.getLogger("shoal.run")

_FAILED_SAVES = 3  # in a row, before a run that cannot save gives up


@dataclass(frozen=True)
class RunResult:
    """The end of a run."""

    run: RunDir
    metrics: MetricsRow
    """Of its last iteration."""
    seconds: float
    """Duration of this sitting; 0 if the goal was reached already."""
    advice: str
    """What limited the speed of the run, and whether more workers would help."""


def ends(goal: Goal, pause: int | None, row: MetricsRow) -> bool:
    """Test whether a sitting ends after this iteration: at the goal or, before it, at `pause` environment steps."""
    return goal.reached(row) or (pause is not None and row["time/total_timesteps"] >= pause)


class Loop:
    """One sitting of a run: from a checkpoint to the goal, a pause, an error or a signal."""

    def __init__(
        self,
        run: RunDir,
        settings: Settings,
        engine: Engine,
        trackers: Sequence[Tracker],
        usage: Usage,
        pause: int | None = None,
    ) -> None:
        self.run, self.settings, self.engine, self.pause = run, settings, engine, pause
        self.trackers, self.usage = trackers, usage
        rows = run.metrics()
        self.meter = Meter(engine, usage, rows[-1:])
        self.evaluator = Evaluator(engine, settings, run.best_file, rows)
        self.saved_at = self.meter.begun
        self.last: tuple[Step, MetricsRow] | None = None
        self.saved_iteration = 0
        self.failed_saves = 0

    def drive(self, steps: Iterator[Step], iteration: int) -> RunResult:
        """Take steps until the goal or pause. However the loop ends, the last complete iteration is saved."""
        self.saved_iteration = iteration
        try:
            for step in steps:
                evaluation = self._evaluate(iteration + 1, step)  # a signal here saves the iteration before
                with signals.held():
                    iteration += 1
                    metrics = self.meter.row(iteration, step, evaluation)
                    self.last = (step, metrics)
                    for tracker in self.trackers:
                        self._write(tracker, metrics)
                    done = ends(self.settings.goal, self.pause, metrics)
                    if done or self._due(iteration):
                        self._save(last_chance=done)
                if done:
                    seconds = time.monotonic() - self.meter.begun
                    return RunResult(self.run, metrics, seconds, self.usage.advice())
        except DiskFault:
            raise
        except BaseException as error:
            with signals.held():
                self._save(last_chance=True)
            if self.saved_iteration:
                error.add_note(f"saved iteration {self.saved_iteration}; continue with: {resume_command(self.run)}")
            raise
        raise AssertionError("the steps of an algorithm never end")

    def _evaluate(self, iteration: int, step: Step) -> dict[str, float]:
        if not self.evaluator.due(step):
            return {}
        try:
            with self.meter.excluded():
                return self.evaluator.metrics(step)
        except OSError as error:
            raise DiskFault(self._cannot("best policy", iteration, error)) from None

    def _write(self, tracker: Tracker, metrics: MetricsRow) -> None:
        try:
            tracker.write(metrics)
        except OSError as error:
            raise DiskFault(self._cannot("metrics", metrics["iteration"], error)) from None

    def _due(self, iteration: int) -> bool:
        if self.failed_saves:
            return True
        waited = time.monotonic() - self.saved_at
        return (
            iteration - self.saved_iteration >= self.settings.checkpoint_every
            or waited >= self.settings.checkpoint_seconds
        )

    def _save(self, last_chance: bool = False) -> None:
        """Save the last complete iteration. If that fails, the old checkpoint stays, and the next iteration retries."""
        if self.last is None or self.last[1]["iteration"] == self.saved_iteration:
            return
        step, metrics = self.last
        iteration = metrics["iteration"]
        try:
            self.run.save(iteration, step.state(), step.policy, self.settings.keep_checkpoints)
        except OSError as error:
            self.failed_saves += 1
            message = self._cannot("checkpoint", iteration, error)
            if last_chance or self.failed_saves >= _FAILED_SAVES:
                raise DiskFault(message) from None
            log.warning("%s", message)
        else:
            self.saved_iteration, self.saved_at, self.failed_saves = iteration, time.monotonic(), 0

    def _cannot(self, what: str, iteration: int, error: OSError) -> str:
        good = (
            f"the last good checkpoint is iteration {self.saved_iteration}"
            if self.saved_iteration
            else "there is no checkpoint yet"
        )
        return (
            f"the {what} of iteration {iteration} could not be written to {self.run.path}: {error.strerror}; {good}. "
            f"Free some space, then continue with: {resume_command(self.run)}"
        )
