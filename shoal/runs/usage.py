"""What limits the speed of a run, and whether more workers would help: measured, not guessed."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Usage:
    """Where the time of a run has gone so far."""

    workers: int
    lanes: int
    own_cores: int | None
    """Cores that the workers share; None where they have cores elsewhere."""
    sampling: float = 0.0
    """Seconds spent sampling."""
    learning: float = 0.0
    """Seconds spent learning."""
    overlap: float = 0.0
    """Seconds in which the head learned while workers sampled; included in both of the above."""
    busy: float = 0.0
    """Seconds that all workers together spent in tasks."""

    def add(self, sampling: float, learning: float, busy: float, overlap: float = 0.0) -> None:
        """Add one iteration."""
        self.sampling += sampling
        self.learning += learning
        self.busy += busy
        self.overlap += overlap

    @property
    def useful(self) -> int:
        """Number of workers that can be busy at once: at most one per lane and one per shared core."""
        return min(self.lanes, self.own_cores or self.lanes)

    @property
    def total(self) -> float:
        """Total seconds; overlapping time counts once."""
        return max(self.sampling + self.learning - self.overlap, 1e-9)

    @property
    def learner_share(self) -> float:
        """Share of the time spent learning."""
        return self.learning / self.total

    @property
    def busy_share(self) -> float:
        """Share of the sampling time in which workers that have a lane are busy."""
        return min(self.busy / max(self.sampling * min(self.workers, self.lanes), 1e-9), 1.0)

    def limit(self) -> str:
        """Name what the run waits for most: learner, environment, lanes, cores or engine; empty until measured."""
        if not self.sampling:
            return ""
        if self.own_cores and self.workers > self.own_cores:
            return "cores"
        if self.learning > self.sampling:
            return "learner"
        if self.busy_share < 0.6:
            return "engine"
        on_all_cores = self.own_cores is not None and self.workers >= self.own_cores
        return "environment" if on_all_cores or self.workers < self.lanes else "lanes"

    def suited(self) -> int:
        """Compute the number of workers with which the run would be fastest, or as fast with fewer."""
        limit = self.limit()
        if limit == "cores":
            return self.useful
        if limit == "engine":
            return max(1, math.ceil(self.workers * self.busy_share))
        return self.useful if self.useful > self.workers and self.saved >= 0.01 else self.workers

    @property
    def saved(self) -> float:
        """Upper bound of the share of time that all useful workers together would save."""
        sampling = self.sampling * min(1.0, self.workers / self.useful)
        return 1 - (sampling + self.learning - min(self.overlap, sampling)) / self.total

    def advice(self) -> str:
        """Say what limits the run and what to do about it, with the measurements."""
        limit, suited = self.limit(), self.suited()
        if not limit:
            return "not measured: the first iteration includes start-up and compilation"
        both = f", {self.overlap / self.total:.0%} overlaps with sampling" if self.overlap else ""
        facts = f"{self.learner_share:.0%} of the time is learning{both}; "
        facts += f"while sampling, workers are busy {self.busy_share:.0%}"
        more = f"--workers {suited} would save up to {self.saved:.0%} of the time"
        if limit == "cores":
            words = f"cores: {self.workers} workers compete for {self.own_cores}. "
            words += f"Use --workers {suited}"
        elif limit == "engine":
            hint = f"use --workers {suited}, which is as fast, or" if suited < self.workers else "use"
            words = f"waiting between tasks, which are short or uneven; {hint} larger batches"
        elif limit == "lanes":
            words = f"lanes: {self.lanes} lanes keep at most {self.lanes} workers busy. More lanes change the result"
        elif limit == "learner":
            words = f"the learner. {more}" if suited > self.workers else "the learner. More workers would not help"
        elif suited > self.workers:
            words = f"the environment. {more}"
        else:
            words = f"the environment, on all {self.own_cores} cores of this machine"
        return f"{words} ({facts})"
