"""Searches with EvoTorch's PGPE. Run by the peers' Python.

    python evotorch_es.py '{"env": "CartPole-v1", "hidden": [], "population": 64, "episodes": 8, "actors": 2,
                            "seed": 0}'

Prints a line of JSON after each generation: steps, seconds, mean return.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import ray
import torch
from evotorch.algorithms import PGPE
from evotorch.neuroevolution import GymNE


def main(job: dict[str, Any]) -> None:
    """Search until the process is stopped."""
    sizes = ["obs_length", *map(str, job["hidden"]), "act_length"]
    layers = [f"Linear({inputs}, {outputs})" for inputs, outputs in itertools.pairwise(sizes)]
    torch.manual_seed(job["seed"])
    if job["actors"]:
        ray.init(address="local", num_cpus=job["actors"], include_dashboard=False, log_to_driver=False)
    network, actors = " >> Tanh() >> ".join(layers), job["actors"] or None
    problem = GymNE(job["env"], network, num_actors=actors, num_episodes=job["episodes"])
    search = PGPE(
        problem, popsize=job["population"], center_learning_rate=1e-12, stdev_learning_rate=0.0, stdev_init=0.05
    )
    while True:
        search.step()
        status = search.status
        line = {"steps": int(status["total_interaction_count"]), "seconds": time.perf_counter(), "updates": 0}
        print(json.dumps(line | {"return": float(status["mean_eval"])}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
