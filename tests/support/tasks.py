"""Tasks for the engine tests."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


def echo(value: Any) -> Any:
    return value


def add(a: Any, b: Any) -> Any:
    return a + b


def total(item: int, values: np.ndarray) -> float:
    return float(values.sum()) + item


def fail(message: str) -> None:
    raise ValueError(message)


def fail_as_user(message: str) -> None:
    from shoal.errors import EnvironmentFault

    raise EnvironmentFault(message)


def fail_oddly(kind: str) -> None:
    if kind == "surrogate":
        raise ValueError("file \udcff is missing")
    raise GeneratorExit("cancelled")


def unsendable(_: int) -> Any:
    return {"fine": 1, "set": {1, 2}}


def is_writeable(array: np.ndarray) -> bool:
    return bool(array.flags.writeable)


def pid(_: int) -> int:
    return os.getpid()


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def kill_once(marker: str) -> str:
    """Kills its worker the first time."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def kill(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_once(marker: str) -> str:
    """Stops its worker, as a debugger or a frozen machine would, the first time."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return "survived"


def hang_once(marker: str) -> str:
    path = Path(marker)
    if not path.exists():
        path.touch()
        time.sleep(600)
    return "survived"


def until(running: str, go: str) -> str:
    """Says that it runs, and waits until it may go on."""
    Path(running).touch()
    while not Path(go).exists():
        time.sleep(0.01)
    return "went"


def leave_child(marker: str) -> int:
    """Starts a process that outlives a careless worker."""
    import subprocess

    return subprocess.Popen(["sleep", "600"]).pid


def modules(_: int) -> list[str]:
    import sys

    return sorted(sys.modules)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def peak_megabytes(_: int) -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ray_node(seconds: float) -> str:
    import ray

    time.sleep(seconds)  # so that each of several idle workers gets one
    return str(ray.get_runtime_context().get_node_id())


not_a_function = 3
