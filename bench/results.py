"""Results of long campaigns on disk: one entry per algorithm, environment and seed, written after each run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.base import disk
from shoal.errors import DiskFault, UsageError

FORMAT = "shoal-bench-2"


@dataclass(frozen=True)
class Result:
    """How one run of a preset ended."""

    algo: str
    env: str
    seed: int
    settings: dict[str, object]
    """All settings of the algorithm, and the preset's other entries."""
    facts: str
    """Date, machine and versions."""
    score: float
    """Mean return of greedy episodes with the final policy."""
    deviation: float
    """Standard deviation of those returns."""
    episodes: int
    training: float | None
    """Mean return of the last 100 training episodes, if any has ended."""
    steps: int
    seconds: float
    digest: str
    curve: list[list[float]]
    """Steps and mean return of the last 100 training episodes, along the way."""


class Results:
    """A file of results; without a path, results are kept only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._all: dict[tuple[str, str, int], Result] = {}
        if path is None or not path.exists():
            return
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
            for record in content["results"]:
                self._keep(Result(**record))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a file of results ({error}). Give another with --results FILE") from None

    def find(self, algo: str, env: str, seed: int, settings: dict[str, object], episodes: int) -> Result | None:
        """Look up a result; None if it is missing, or if episodes, settings or their defaults have changed since."""
        found = self._all.get((algo, env, seed))
        return found if found is not None and (found.settings, found.episodes) == (settings, episodes) else None

    def add(self, result: Result) -> None:
        """Add a result and write the file."""
        self._keep(result)
        if self._path is None:
            return
        records = [asdict(self._all[key]) for key in sorted(self._all)]
        content = json.dumps({"format": FORMAT, "results": records}, indent=None)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            disk.write_file(self._path, content.encode())
        except OSError as error:
            raise DiskFault(f"results could not be written to {self._path}: {error.strerror}") from None

    def _keep(self, result: Result) -> None:
        self._all[result.algo, result.env, result.seed] = result
