"""The results of a comparison: scores, learning curves over steps and over time, a table and a plot."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.commands.campaign.runs import PlannedRun
from shoal.engines.base import Engine
from shoal.policies.policy import SavedPolicy
from shoal.reports import curves
from shoal.reports.tables import interquartile_mean, markdown_table
from shoal.runs.metrics import MetricsRow
from shoal.sampling.evaluation import evaluate_policy

POINTS = 120
"""Points of a curve in the plot."""
EPISODES = 100
"""A point of a curve is the mean return of about this many episodes: the last ones in training, or, where an algorithm
perturbs its policy, the last ones of the policy itself."""


@dataclass(frozen=True)
class Finding:
    """The result of one run."""

    run: PlannedRun
    score: float
    """Mean return of greedy episodes with the final policy."""
    curve: np.ndarray
    """(points, 3): steps, seconds and mean return; NaN before the first episode has ended."""

    @property
    def known(self) -> np.ndarray:
        """The part of the curve that has returns."""
        known: np.ndarray = self.curve[~np.isnan(self.curve[:, 2])]
        return known

    @property
    def along(self) -> float:
        """Mean return along the way: the area under the curve over steps, divided by its width."""
        steps, _, returns = self.known.T
        if len(steps) < 2:
            return float(returns[0]) if len(steps) else math.nan
        return float(np.trapezoid(returns, steps) / (steps[-1] - steps[0]))

    def first(self, threshold: float) -> float | None:
        """Return the steps at which the return first reached a threshold."""
        reached = np.flatnonzero(self.curve[:, 2] >= threshold)
        return float(self.curve[reached[0], 0]) if len(reached) else None


def assess_run(run: PlannedRun, engine: Engine, episodes: int) -> Finding:
    """Score the final policy of a run, and read its learning curve."""
    evaluation = evaluate_policy(engine, SavedPolicy.load(run.folder.policy_file), episodes)
    curve = learning_curve(run.folder.metrics(), run.spec.config.score_episodes)
    return Finding(run, float(evaluation.returns.mean()), curve)


def learning_curve(rows: Sequence[MetricsRow], own: int) -> np.ndarray:
    """Compute the steps, seconds and return (points, 3) of a run from its metrics.

    `own` is the number of episodes in each iteration that evaluate the policy itself; 0 if none do.
    """
    scores: deque[float] = deque(maxlen=max(1, EPISODES // max(own, 1)))
    points = []
    for row in rows:
        score = row.get("eval/mean_reward", math.nan) if own else row.get("rollout/ep_rew_mean", math.nan)
        if own:
            scores.append(score)
            score = statistics.fmean(scores)
        points.append((row["time/total_timesteps"], row["time/time_elapsed"], score))
    return np.array(points, np.float64).reshape(-1, 3)


def tabulate(findings: Sequence[Finding], threshold: float | None) -> str:
    """Make a table with a row for each side, best score first."""
    header = ["", "seeds", "score", "lowest to highest", "interquartile mean", "along the way"]
    header += [] if threshold is None else [f"steps to {threshold:g}"]
    header += ["steps", "seconds"]
    rows = [(statistics.fmean(found.score for found in side), _row(side, threshold)) for side in _sides(findings)]
    return markdown_table(header, [row for _, row in sorted(rows, key=lambda pair: -pair[0])])


def _sides(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Group findings by label, in the order of the command line."""
    labels = dict.fromkeys(found.run.label for found in findings)
    return [[found for found in findings if found.run.label == label] for label in labels]


def _row(found: Sequence[Finding], threshold: float | None) -> list[str]:
    scores = [finding.score for finding in found]
    row = [
        found[0].run.label,
        str(len(found)),
        f"{statistics.fmean(scores):.1f}",
        f"{min(scores):.1f} to {max(scores):.1f}",
        f"{interquartile_mean(scores):.1f}",
        f"{statistics.fmean(finding.along for finding in found):.1f}",
    ]
    if threshold is not None:
        reached = [steps for finding in found if (steps := finding.first(threshold)) is not None]
        count = "" if len(reached) == len(found) else f" ({len(reached)} of {len(found)})"
        row.append(f"{statistics.median(reached):,.0f}{count}" if reached else "never")
    taken, seconds = (statistics.median(finding.curve[-1, column] for finding in found) for column in (0, 1))
    return [*row, f"{taken:,.0f}", f"{seconds:.1f}"]


def plot(title: str, findings: Sequence[Finding]) -> str:
    """Plot mean and range over seeds against environment steps and against time, as an SVG."""
    sides = _sides([found for found in findings if len(found.known)])
    panels = [
        curves.Panel(axis, [_curve(side, column) for side in sides])
        for column, axis in ((0, "environment steps"), (1, "seconds"))
    ]
    return curves.draw_curves(title, panels)


def _curve(found: Sequence[Finding], column: int) -> curves.Curve:
    """Compute mean and range of several curves, from where all have begun. A finished run keeps its last return."""
    known = [finding.known for finding in found]
    across = np.linspace(max(curve[0, column] for curve in known), max(curve[-1, column] for curve in known), POINTS)
    returns = np.stack([np.interp(across, curve[:, column], curve[:, 2]) for curve in known])
    band = zip(across, returns.min(axis=0), returns.max(axis=0), strict=True) if len(found) > 1 else ()
    points = zip(across, returns.mean(axis=0), strict=True)
    return curves.Curve(found[0].run.label, list(points), list(band))
