"""How soon does a run step its first environment, and how much memory does a worker take?

    python bench/startup.py [--rounds 5]

The first environment step is seen from inside: a CartPole that writes down when it is first stepped. Compiled code is
cached by a run before the first round. Memory is what is the worker's own (unique set size) beyond that of a process
that only makes and steps the same number of environments.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil

import shoal
from shoal.engines.processes import ProcessesEngine

sys.path.insert(0, str(Path(__file__).parent))
from lanes import ENVS, Sampler

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


def seconds_to_first_step(folder: Path, number: int) -> float:
    stamp = folder / f"stamp-{number}"
    environment = os.environ | {"FIRST_STEP": str(stamp), "PYTHONPATH": f"{folder}{os.pathsep}{Path.cwd()}"}
    command = [sys.executable, "-m", "shoal", "train", "trpo", "stamped:Stamped-v0", "--iterations", "1"]
    begun = time.time()
    subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    return float(stamp.read_text()) - begun


def worker_bytes(env_id: str, lanes: int, width: int) -> int:
    with shoal.engine("processes", workers=1) as engine:
        assert isinstance(engine, ProcessesEngine)
        Sampler(engine, env_id, lanes, width, steps=128).run(1.0)
        return int(psutil.Process(engine.pids[0]).memory_full_info().uss)


def bare_bytes(env_id: str, count: int) -> int:
    command = [sys.executable, "-c", textwrap.dedent(BARE), env_id, str(count)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    )
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stamped.py").write_text(textwrap.dedent(STAMPED))
        seconds_to_first_step(folder, 0)
        times = [seconds_to_first_step(folder, number) for number in range(1, wanted.rounds + 1)]
    middle, low, high = statistics.median(times), min(times), max(times)
    print(f"start to first environment step: median {middle:.2f} s, from {low:.2f} to {high:.2f} s")
    for env_id in ENVS:
        worker, bare = worker_bytes(env_id, 4, 8), bare_bytes(env_id, 32)
        print(
            f"{env_id}: a worker with 32 environments has {worker / 2**20:.0f} MB, a bare process with as many "
            f"{bare / 2**20:.0f} MB: {(worker - bare) / 2**20:.0f} MB beyond its environment"
        )


if __name__ == "__main__":
    main()
