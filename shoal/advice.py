"""What limits a run, and would more workers help? From telemetry, not from guesses."""

from __future__ import annotations

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
    def cores(self) -> int:
        """Cores that there are for workers."""
        return self.own_cores or self.workers

    @property
    def useful(self) -> int:
        """How many workers can be at work at once: no more than lanes, nor than cores."""
        return min(self.lanes, self.cores)

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
        """What the run waits for most: learner, environment, lanes, cores or engine."""
        if self.workers > self.cores:
            return "cores"
        if self.learning > self.sampling:
            return "learner"
        if self.busy_share < 0.6:
            return "engine"
        return "lanes" if self.workers >= self.lanes else "environment"

    def advice(self) -> str:
        """What limits the run and what to do about it, with the numbers that show it."""
        both = f", {self.overlap / self.total:.0%} both at once" if self.overlap else ""
        facts = f"{self.learner_share:.0%} of the time is learning{both}; "
        facts += f"while sampling, workers are busy {self.busy_share:.0%}"
        limit = self.limit()
        if limit == "learner":
            words = f"the learner. More workers would save at most {max(0.0, 1 - self.learner_share):.0%} of the time"
        elif limit == "cores":
            words = f"cores: {self.workers} workers share {self.cores} and get in each other's way. "
            words += f"Use --workers {self.useful}"
        elif limit == "engine":
            fewer = max(1, round(self.workers * self.busy_share))
            hint = f"--workers {fewer} would do as well, or" if fewer < self.workers else "try"
            words = f"waiting between tasks, which are short or uneven; {hint} larger batches"
        elif limit == "lanes":
            words = f"lanes: {self.lanes} of them keep at most {self.lanes} workers busy. More lanes change the result"
        elif self.useful > self.workers:
            sampling = self.sampling * self.workers / self.useful
            saved = 1 - (sampling + self.learning - min(self.overlap, sampling)) / self.total
            words = f"the environment. --workers {self.useful} would save about {saved:.0%} of the time"
        else:
            words = f"the environment, on all {self.cores} cores of this machine"
        return f"{words} ({facts})"
