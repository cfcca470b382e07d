"""What a person watches: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_PLAIN_EVERY = 2.0  # seconds between plain lines


@dataclass(frozen=True)
class Goal:
    """When a run ends: at a number of environment steps, or of iterations where that is given."""

    steps: int
    iterations: int | None = None

    def reached(self, iteration: int, metrics: dict[str, Any]) -> float:
        """How much of it is done, 0 to 1."""
        if self.iterations is not None:
            return min(iteration / self.iterations, 1.0)
        return min(float(metrics["time/total_timesteps"]) / self.steps, 1.0)

    def __str__(self) -> str:
        return f"{self.steps:,} steps" if self.iterations is None else f"{self.iterations} iterations"


def describe(iteration: int, metrics: dict[str, Any]) -> str:
    """The numbers of one iteration in a few words."""
    parts = [f"iteration {iteration}", f"{metrics['time/total_timesteps']:,} steps"]
    if "rollout/ep_rew_mean" in metrics:
        parts.append(f"return {metrics['rollout/ep_rew_mean']:.1f}")
    if "eval/mean_reward" in metrics:
        parts.append(f"own {metrics['eval/mean_reward']:.1f}")
    parts.append(f"{metrics['time/fps']:,.0f} steps/s")
    parts.append(f"workers idle {metrics['time/idle_share']:.0%}")
    if metrics["time/limited_by"]:
        workers, suited = metrics["time/workers"], metrics["time/workers_suited"]
        other = f"; {suited} workers would suit" if suited != workers else ""
        parts[-1] += f" (limit: {metrics['time/limited_by']}{other})"
    return ", ".join(parts)


class LiveConsole:
    """A progress bar with steps, return, speed, time left and idle share."""

    def __init__(self, console: Console, title: str, goal: Goal) -> None:
        self._goal = goal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            _Numbers(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=False,
        )
        self._task = self._progress.add_task(title, total=1.0, numbers="starting")
        self._progress.start()

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Redraw."""
        done = self._goal.reached(iteration, metrics)
        self._progress.update(self._task, completed=done, numbers=describe(iteration, metrics))

    def close(self) -> None:
        """Leave the last state standing."""
        self._progress.stop()


class _Numbers(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["numbers"])


class PlainConsole:
    """A line at the first iteration, then one every few seconds, and the last one."""

    def __init__(self, console: Console, title: str, goal: Goal) -> None:
        self._console, self._title, self._goal = console, title, goal
        self._next = 0.0
        self._unsaid: str | None = None

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Print, if the last line is old enough."""
        line = f"{self._title}: {self._goal.reached(iteration, metrics):4.0%}  {describe(iteration, metrics)}"
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PLAIN_EVERY
            self._say(line)
            self._unsaid = None
        else:
            self._unsaid = line

    def close(self) -> None:
        """Print the last iteration if it was not printed."""
        if self._unsaid is not None:
            self._say(self._unsaid)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def console_tracker(console: Console, title: str, goal: Goal) -> LiveConsole | PlainConsole:
    """The one that fits where the output goes."""
    return (LiveConsole if console.is_terminal and not console.is_dumb_terminal else PlainConsole)(console, title, goal)
