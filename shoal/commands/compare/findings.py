"""What the runs of a comparison gave: scores, learning curves over steps and over time, a table and a picture."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.commands import evaluate
from shoal.commands.compare.plan import ComparedRun
from shoal.engines.base import Engine
from shoal.policies.policy import SavedPolicy
from shoal.reports import curves
from shoal.reports.tables import interquartile_mean, markdown_table
from shoal.runs.metrics import MetricsRow

POINTS = 120
"""A curve of the picture has so many."""
EPISODES = 100
"""A return is the mean of about so many: of the last ones in training, or, where an algorithm tries policies around its
own, of the last ones of its own."""


@dataclass(frozen=True)
class Finding:
    """What one run gave."""

    job: ComparedRun
    score: float
    """Mean return of greedy episodes with the final policy."""
    curve: np.ndarray
    """Steps, seconds and mean return, along the way (points, 3); no number before an episode has ended."""

    @property
    def known(self) -> np.ndarray:
        """The part of the curve that has returns."""
        known: np.ndarray = self.curve[~np.isnan(self.curve[:, 2])]
        return known

    @property
    def along(self) -> float:
        """Mean return along the way, by steps: the area under the curve over its width."""
        steps, _, returns = self.known.T
        if len(steps) < 2:
            return float(returns[0]) if len(steps) else math.nan
        return float(np.trapezoid(returns, steps) / (steps[-1] - steps[0]))

    def first(self, threshold: float) -> float | None:
        """Steps at which the return reached a threshold."""
        reached = np.flatnonzero(self.curve[:, 2] >= threshold)
        return float(self.curve[reached[0], 0]) if len(reached) else None


def assess(job: ComparedRun, engine: Engine, episodes: int) -> Finding:
    """What a finished run gave."""
    scores = evaluate.evaluate_policy(engine, SavedPolicy.load(job.run.policy_file), episodes)
    own = job.config.score_episodes
    return Finding(job, float(scores.returns.mean()), learning_curve(job.run.metrics(), own))


def learning_curve(lines: Sequence[MetricsRow], own: int) -> np.ndarray:
    """Steps, seconds and return (points, 3) of a run, from the lines of its metrics.

    `own` is how many episodes of its own policy an algorithm that tries others around it plays in each iteration.
    """
    scores: deque[float] = deque(maxlen=max(1, EPISODES // max(own, 1)))
    points = []
    for line in lines:
        score = line.get("eval/mean_reward", math.nan) if own else line.get("rollout/ep_rew_mean", math.nan)
        if own:
            scores.append(score)
            score = statistics.fmean(scores)
        points.append((line["time/total_timesteps"], line["time/time_elapsed"], score))
    return np.array(points, np.float64).reshape(-1, 3)


def tabulate(findings: Sequence[Finding], threshold: float | None) -> str:
    """A row for each side, with the best score first."""
    head = ["", "seeds", "score", "lowest to highest", "interquartile mean", "along the way"]
    head += [] if threshold is None else [f"steps to {threshold:g}"]
    head += ["steps", "seconds"]
    rows = [(statistics.fmean(found.score for found in sides), _row(sides, threshold)) for sides in _sides(findings)]
    return markdown_table(head, [row for _, row in sorted(rows, key=lambda pair: -pair[0])])


def _sides(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings by what is compared, in the order of the command."""
    labels = dict.fromkeys(found.job.label for found in findings)
    return [[found for found in findings if found.job.label == label] for label in labels]


def _row(found: Sequence[Finding], threshold: float | None) -> list[str]:
    scores = [finding.score for finding in found]
    row = [
        found[0].job.label,
        str(len(found)),
        f"{statistics.fmean(scores):.1f}",
        f"{min(scores):.1f} to {max(scores):.1f}",
        f"{interquartile_mean(scores):.1f}",
        f"{statistics.fmean(finding.along for finding in found):.1f}",
    ]
    if threshold is not None:
        reached = [steps for finding in found if (steps := finding.first(threshold)) is not None]
        all_of_them = "" if len(reached) == len(found) else f" ({len(reached)} of {len(found)})"
        row.append(f"{statistics.median(reached):,.0f}{all_of_them}" if reached else "never")
    taken, seconds = (statistics.median(finding.curve[-1, column] for finding in found) for column in (0, 1))
    return [*row, f"{taken:,.0f}", f"{seconds:.1f}"]


def picture(title: str, findings: Sequence[Finding]) -> str:
    """Mean and range over seeds against environment steps and against time, as an SVG."""
    sides = _sides([found for found in findings if len(found.known)])
    panels = [
        curves.Panel(axis, [_curve(side, column) for side in sides])
        for column, axis in ((0, "environment steps"), (1, "seconds"))
    ]
    return curves.draw_curves(title, panels)


def _curve(found: Sequence[Finding], column: int) -> curves.Curve:
    """Mean and range of several curves, from where all have begun. One that has ended keeps its last return."""
    known = [finding.known for finding in found]
    across = np.linspace(max(curve[0, column] for curve in known), max(curve[-1, column] for curve in known), POINTS)
    returns = np.stack([np.interp(across, curve[:, column], curve[:, 2]) for curve in known])
    band = zip(across, returns.min(axis=0), returns.max(axis=0), strict=True) if len(found) > 1 else ()
    points = zip(across, returns.mean(axis=0), strict=True)
    return curves.Curve(found[0].job.label, list(points), list(band))
