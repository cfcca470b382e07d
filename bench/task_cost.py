"""Overhead of an engine per task: `python -m bench.task_cost ENGINE WORKERS SECONDS` prints it as a line of JSON.

The tasks do nothing. Many at once, as an algorithm submits them, measure throughput; one at a time, the round trip.
"""

from __future__ import annotations

import json
import sys
import time

import shoal

AT_ONCE = 64


def nothing(number: int) -> int:
    """Task: return the argument."""
    return number


def microseconds(engine: shoal.Engine, seconds: float, at_once: int = AT_ONCE) -> float:
    """Measure the microseconds per task for at least `seconds`, with `at_once` tasks submitted together."""
    engine.map(nothing, range(AT_ONCE * engine.workers))
    tasks, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        engine.map(nothing, range(at_once))
        tasks += at_once
    return 1e6 * passed / tasks


def main() -> None:
    """Measure one engine and print the result."""
    name, workers, seconds = sys.argv[1:]
    with shoal.engine(name, workers=int(workers)) as engine:
        cost = microseconds(engine, float(seconds))
    print(json.dumps({"microseconds": cost}), flush=True)


if __name__ == "__main__":
    main()
