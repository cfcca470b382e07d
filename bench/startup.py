"""Time from the start of a run to its first environment step, and a worker's memory.

A modified CartPole records the time of its first step. A run before the first round fills the cache of compiled code.
Memory is the unique set size of a worker, and of a process that only creates and steps the same number of environments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bench import machine
from bench.lanes import ENVS, Sampler
from bench.options import BenchOptions, Say
from bench.report import Report, seconds
from bench.rounds import spread
from bench.watch import shoal_environment
from shoal.base.host import WORKER_ENVIRONMENT, shoal_command
from shoal.engines.processes import ProcessesEngine
from shoal.envs.make import EnvSpec
from shoal.errors import MissingExtra
from shoal.reports.tables import markdown_table

STAMPED = """
    import os, time
    from pathlib import Path
    import gymnasium
    from gymnasium.envs.classic_control import CartPoleEnv

    class Stamped(CartPoleEnv):
        def step(self, action):
            path = Path(os.environ["FIRST_STEP"])
            if not path.exists():
                path.write_text(repr(time.time()))
            return super().step(action)

    gymnasium.register("Stamped-v0", entry_point=Stamped, max_episode_steps=500)
"""

BARE = """
    import sys, gymnasium, psutil
    envs = [gymnasium.make(sys.argv[1], disable_env_checker=True) for _ in range(int(sys.argv[2]))]
    for env in envs:
        env.reset(seed=0)
        env.step(env.action_space.sample())
    print(psutil.Process().memory_full_info().uss)
"""


ENVIRONMENTS = 32


@dataclass(frozen=True)
class StartupOptions(BenchOptions):
    """Time from the start of a run to its first environment step, and a worker's memory."""

    env: tuple[str, ...] = ENVS
    """Environments for which to measure memory."""
    rounds: int = 5
    """Number of starts."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ENVS[:1], "rounds": 3}

    def environments(self) -> list[str]:
        return list(self.env)


OPTIONS = StartupOptions


def run(options: StartupOptions, say: Say) -> Report:
    """Measure and report."""
    try:
        import psutil  # noqa: F401 - checked before anything is measured
    except ImportError:
        raise MissingExtra("measuring memory needs psutil, which is not installed. Run: pip install psutil") from None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stamped.py").write_text(textwrap.dedent(STAMPED))
        _first_step(folder, 0)
        found = spread(_first_step(folder, number) for number in range(1, options.rounds + 1))
    rows = [["start to first environment step, seconds", seconds(found)]]
    say(f"start to first environment step: {seconds(found)} s")
    for env in options.env:
        worker, bare = _worker_bytes(env), _bare_bytes(env)
        say(f"{env}: a worker takes {_mebibytes(worker)}, a bare process {_mebibytes(bare)}")
        rows.append([f"memory of a worker with {ENVIRONMENTS} {env}", _mebibytes(worker)])
        rows.append([f"memory of a bare process with {ENVIRONMENTS} {env}", _mebibytes(bare)])
    notes = (
        f"Median of {options.rounds} starts (lowest to highest), after one that fills the cache of compiled code. "
        f"Memory is the unique set size of the process. {machine.facts({})}"
    )
    return Report("startup", markdown_table(["benchmark", "result"], rows), notes)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def _first_step(folder: Path, number: int) -> float:
    """Measure the seconds from the start of the process to the first environment step."""
    stamp = folder / f"stamp-{number}"
    environment = shoal_environment() | {
        "FIRST_STEP": str(stamp)
    }  # the module is found because the run starts in the folder
    command = shoal_command("train", "trpo", "stamped:Stamped-v0", "--iterations", "1")
    begun = time.time()
    subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    return float(stamp.read_text()) - begun


def _worker_bytes(env: str) -> int:
    import psutil

    with ProcessesEngine(workers=1) as engine:
        Sampler(engine, EnvSpec(env), lanes=4, width=ENVIRONMENTS // 4, steps=128).run(1.0)
        return int(psutil.Process(engine.pids[0]).memory_full_info().uss)


def _bare_bytes(env: str) -> int:
    command = [sys.executable, "-c", textwrap.dedent(BARE), env, str(ENVIRONMENTS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | WORKER_ENVIRONMENT)
    return int(done.stdout.split()[-1])
