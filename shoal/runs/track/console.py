"""Progress for people: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from shoal.runs.goal import Goal
from shoal.runs.metrics import MetricsRow

_PLAIN_EVERY = 2.0  # seconds between plain lines


def summary(metrics: MetricsRow) -> str:
    """Summarise one iteration in a line."""
    parts = [f"iteration {metrics['iteration']}", f"{metrics['time/total_timesteps']:,} steps"]
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

    def write(self, metrics: MetricsRow) -> None:
        self._progress.update(self._task, completed=self._goal.progress(metrics), numbers=summary(metrics))

    def close(self) -> None:
        """Stop redrawing; the last state stays on the screen."""
        self._progress.stop()


class _Numbers(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["numbers"])


class PlainConsole:
    """Prints the first iteration, then one every few seconds, and the last one."""

    def __init__(self, console: Console, title: str, goal: Goal) -> None:
        self._console, self._title, self._goal = console, title, goal
        self._next = 0.0
        self._unprinted: str | None = None

    def write(self, metrics: MetricsRow) -> None:
        """Print the iteration, unless the previous line is too recent."""
        line = f"{self._title}: {self._goal.progress(metrics):4.0%}  {summary(metrics)}"
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PLAIN_EVERY
            self._print(line)
            self._unprinted = None
        else:
            self._unprinted = line

    def close(self) -> None:
        """Print the last iteration if it was not printed yet."""
        if self._unprinted is not None:
            self._print(self._unprinted)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def console_tracker(console: Console, title: str, goal: Goal) -> LiveConsole | PlainConsole:
    """Choose the tracker that suits the output."""
    return (LiveConsole if console.is_terminal and not console.is_dumb_terminal else PlainConsole)(console, title, goal)
