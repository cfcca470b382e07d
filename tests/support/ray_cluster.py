"""A Ray cluster whose nodes join and leave during a run. test_ray.py runs it as a separate process."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from rich.console import Console

import shoal
from shoal.algos import trpo
from shoal.engines.ray.engine import RayEngine
from shoal.runs import run
from shoal.runs.metrics import MetricsRow
from shoal.runs.spec import RunSpec
from tests.support import tasks


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class AddsAndKillsNode:
    """A tracker that adds a node after the second iteration and kills it in the middle of the fifth."""

    def __init__(self, engine: shoal.Engine, cluster: Cluster) -> None:
        self.engine, self.cluster, self.node = engine, cluster, None
        self.workers: list[int] = []

    def write(self, metrics: MetricsRow) -> None:
        self.workers.append(self.engine.workers)
        if metrics["iteration"] == 2:
            self.node = self.cluster.add_node(num_cpus=2)
            wait(lambda: len(self.engine.pids) == 3)
        if metrics["iteration"] == 4:
            threading.Thread(target=self.remove, args=(self.engine.telemetry().tasks,), daemon=True).start()

    def remove(self, tasks_before: int) -> None:
        wait(lambda: self.engine.telemetry().tasks > tasks_before)
        self.cluster.remove_node(self.node, allow_graceful=False)

    def close(self) -> None:
        pass


def elastic(cluster: Cluster) -> dict[str, Any]:
    """A run on one node, then on two, then on one again."""
    config = trpo.Config(batch_steps=256, lanes=4, width=2, hidden=(8,), value_epochs=1)
    settings = run.Settings("tests.support.toys:Walk-v0", iterations=8, name="elastic", tensorboard=False, engine="ray")
    with RayEngine() as engine:
        tracker = AddsAndKillsNode(engine, cluster)
        run.train(RunSpec("trpo", settings, config), engine=engine, trackers=[tracker], console=Console(quiet=True))
        wait(lambda: engine.telemetry().lost_workers >= 2)
        return {"workers": tracker.workers, "lost": engine.telemetry().lost_workers}


class LogLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def mixed(cluster: Cluster) -> dict[str, Any]:
    """A second node whose arithmetic differs."""
    logged = LogLines()
    logging.getLogger("shoal").addHandler(logged)
    node = cluster.add_node(num_cpus=2, env_vars={"OPENBLAS_CORETYPE": "Nehalem"})
    with RayEngine() as engine:
        answers = engine.map(tasks.add, range(10), 1)
        wait(lambda: any("is not used" in line for line in logged.lines))
        wait(lambda: engine.workers == 1)
        threads = engine.submit(tasks.variable, "OPENBLAS_NUM_THREADS").result(60)
    cluster.remove_node(node)
    return {"answers": answers, "threads": threads}


def nodes_used(placement: str) -> int:
    with RayEngine(2, placement=placement) as engine:
        wait(lambda: len(engine.pids) == 2)
        return len(set(engine.map(tasks.ray_node, [1.0, 1.0])))


def elsewhere(cluster: Cluster) -> list[Any]:
    """A node whose processes are not in the process table of the head: stopped and dead workers are replaced."""
    words = ["start", f"--address={cluster.address}", "--num-cpus=1", '--resources={"away": 1}', "--block"]
    command = ["unshare", "-pf", "--mount-proc", "--kill-child", sys.executable, "-m", "ray.scripts.scripts", *words]
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(lambda: "away" in ray.cluster_resources())
    with RayEngine(1, resources={"away": 1}, lease=4.0) as engine:
        answers = [
            engine.submit(tasks.stop_once, "stopped").result(60),
            engine.submit(tasks.kill_once, "killed").result(60),
        ]
        pids = engine.pids
    node.kill()  # all processes of its namespace die with it
    node.wait(30)
    return [*answers, pids]


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found = elastic(cluster) | mixed(cluster)
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    found |= {placement: nodes_used(placement) for placement in ("spread", "pack")}
    found["elsewhere"] = elsewhere(cluster) if os.getuid() == 0 else None
    Path("found.json").write_text(json.dumps(found))  # Ray prints too
    ray.shutdown()
    cluster.shutdown()
