"""metrics.jsonl: one line of JSON per iteration."""

from __future__ import annotations

import json
import math
from pathlib import Path

from shoal.runs.metrics import MetricsRow


class JsonLines:
    """Appends to a file, unbuffered, so that a killed process loses no line that it has written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, metrics: MetricsRow) -> None:
        """Append one line. Numbers that are not finite become null, which every JSON reader accepts."""
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in metrics.items()}
        self._file.write((json.dumps(clean) + "\n").encode())

    def close(self) -> None:
        self._file.close()
