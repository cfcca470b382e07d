"""What an engine adds to a task: `python -m bench.task_cost ENGINE WORKERS SECONDS` prints it as a line of JSON.

Tasks that do nothing, submitted many at a time as an algorithm does: what one costs among others. With one at a time it
is the way there and back.
"""

from __future__ import annotations

import json
import sys
import time

import shoal

AT_ONCE = 64


def nothing(number: int) -> int:
    """Task: give back what came."""
    return number


def microseconds(engine: shoal.Engine, seconds: float, at_once: int = AT_ONCE) -> float:
    """Microseconds per task, over at least so many seconds."""
    engine.map(nothing, range(AT_ONCE * engine.workers))
    tasks, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        engine.map(nothing, range(at_once))
        tasks += at_once
    return 1e6 * passed / tasks


def main() -> None:
    """Measure one engine."""
    name, workers, seconds = sys.argv[1:]
    with shoal.engine(name, workers=int(workers)) as engine:
        cost = microseconds(engine, float(seconds))
    print(json.dumps({"microseconds": cost}), flush=True)


if __name__ == "__main__":
    main()
