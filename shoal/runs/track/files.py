"""metrics.jsonl: one line of JSON for each iteration."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends to a file. Each line is handed to the system at once; a killed process loses none it has written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null, which every JSON reader takes."""
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in metrics.items()}
        self._file.write((json.dumps({"iteration": iteration, **clean}) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
