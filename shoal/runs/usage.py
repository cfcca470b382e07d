"""What limits a run, and would more workers help? From telemetry, not from guesses."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Usage:
    """Where the time of a run went so far."""

    workers: int
    lanes: int
    own_cores: int | None
    """Cores that the workers share; None where each has its own, elsewhere."""
    sampling: float = 0.0
    """Seconds in which samples were on their way."""
    learning: float = 0.0
    """Seconds in which the head learned."""
    overlap: float = 0.0
    """Seconds of both of these in which the head learned while samples were on their way."""
    busy: float = 0.0
    """Seconds that workers spent in tasks, all together."""

    def add(self, sampling: float, learning: float, busy: float, overlap: float = 0.0) -> None:
        """Count one iteration."""
        self.sampling += sampling
        self.learning += learning
        self.busy += busy
        self.overlap += overlap

    @property
    def useful(self) -> int:
        """How many workers can be at work at once: no more than lanes, nor than cores of this machine."""
        return min(self.lanes, self.own_cores or self.lanes)

    @property
    def total(self) -> float:
        """Seconds in all: what happened at once counts once."""
        return max(self.sampling + self.learning - self.overlap, 1e-9)

    @property
    def learner_share(self) -> float:
        """Share of the time that goes into learning."""
        return self.learning / self.total

    @property
    def busy_share(self) -> float:
        """Share of the sampling time in which those workers that have a lane are busy."""
        return min(self.busy / max(self.sampling * min(self.workers, self.lanes), 1e-9), 1.0)

    def limit(self) -> str:
        """What the run waits for most: learner, environment, lanes, cores or engine; empty before it was measured."""
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
        """With how many workers the run would be faster, or as fast with fewer."""
        limit = self.limit()
        if limit == "cores":
            return self.useful
        if limit == "engine":
            return max(1, math.ceil(self.workers * self.busy_share))
        return self.useful if self.useful > self.workers and self.saved >= 0.01 else self.workers

    @property
    def saved(self) -> float:
        """Share of the time that would be saved, at most, if all useful workers were there."""
        sampling = self.sampling * min(1.0, self.workers / self.useful)
        return 1 - (sampling + self.learning - min(self.overlap, sampling)) / self.total

    def advice(self) -> str:
        """What limits the run and what to do about it, with the numbers that show it."""
        limit, suited = self.limit(), self.suited()
        if not limit:
            return "not known: that takes a second iteration, because the first one starts and compiles"
        both = f", {self.overlap / self.total:.0%} both at once" if self.overlap else ""
        facts = f"{self.learner_share:.0%} of the time is learning{both}; "
        facts += f"while sampling, workers are busy {self.busy_share:.0%}"
        more = f"--workers {suited} would save up to {self.saved:.0%} of the time"
        if limit == "cores":
            words = f"cores: {self.workers} workers share {self.own_cores} and get in each other's way. "
            words += f"Use --workers {suited}"
        elif limit == "engine":
            hint = f"--workers {suited} would do as well, or" if suited < self.workers else "try"
            words = f"waiting between tasks, which are short or uneven; {hint} larger batches"
        elif limit == "lanes":
            words = f"lanes: {self.lanes} of them keep at most {self.lanes} workers busy. More lanes change the result"
        elif limit == "learner":
            words = f"the learner. {more}" if suited > self.workers else "the learner. More workers would not help"
        elif suited > self.workers:
            words = f"the environment. {more}"
        else:
            words = f"the environment, on all {self.own_cores} cores of this machine"
        return f"{words} ({facts})"
