"""The Python API in fresh processes: `import shoal`, `shoal.load` with a first action, and one action after another.

Each round is one process per policy. The processes of an unmeasured round compile Python's modules and fill the disk's
cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench import machine
from bench.options import BenchOptions, Say
from bench.report import Report
from bench.rounds import spread
from bench.watch import shoal_environment
from shoal.base import seeding
from shoal.policies.actions import Categorical, Gaussian
from shoal.policies.policy import Policy, SavedPolicy, Weights
from shoal.reports.tables import markdown_table

MEASURE = """
    import json, sys, time
    path, seconds = sys.argv[1], float(sys.argv[2])
    begun = time.perf_counter()
    import shoal
    imported = time.perf_counter()
    policy = shoal.load(path)
    policy.act([0.0] * policy.observation_shape[0])
    acted = time.perf_counter()

    import numpy as np
    observations = np.random.default_rng(0).normal(size=(1000, *policy.observation_shape)).astype(np.float32)
    for observation in observations:
        policy.act(observation)
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        for observation in observations:
            policy.act(observation)
        calls += len(observations)
    print(json.dumps({"import": imported - begun, "load": acted - imported, "act": passed / calls}))
"""

POLICIES = {
    "4 observations, 2 choices": Policy((4,), "<f4", Categorical((2,), (0,), scalar=True), normalise=True),
    "17 observations, 6 numbers": Policy((17,), "<f4", Gaussian((6,), (-1.0,) * 6, (1.0,) * 6, "<f4"), normalise=True),
}
"""Policies of 64x64, of the sizes of CartPole-v1 and HalfCheetah-v5."""

TARGETS = {"import": "50 ms", "load": "500 ms", "act": "30 µs"}


@dataclass(frozen=True)
class ApiOptions(BenchOptions):
    """The Python API: import, load and act."""

    rounds: int = 9
    """Number of processes per policy."""
    seconds: float = 1.0
    """Seconds of actions in each process."""

    QUICK: ClassVar[dict[str, Any]] = {"rounds": 3, "seconds": 0.2}


OPTIONS = ApiOptions


def run(options: ApiOptions, say: Say) -> Report:
    """Measure and report."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{number}.safetensors" for number, name in enumerate(POLICIES)}
        for name, path in files.items():
            path.write_bytes(_saved(POLICIES[name]).to_bytes())
            _measured(path, 0.01)
        for number in range(options.rounds):
            for name, path in files.items():
                found[name].append(_measured(path, options.seconds))
            say(f"  round {number + 1} of {options.rounds}: {'; '.join(_brief(found[name][-1]) for name in found)}")
    every = [one for measured in found.values() for one in measured]
    rows = [
        ["`import shoal`", _range([one["import"] for one in every], 1e3, "ms"), TARGETS["import"]],
        ["`shoal.load` and the first `act`", _range([one["load"] for one in every], 1e3, "ms"), TARGETS["load"]],
    ]
    for name, measured in found.items():
        rows.append([f"`act`, {name}", _range([one["act"] for one in measured], 1e6, "µs"), TARGETS["act"]])
    notes = (
        f"Median of {options.rounds} fresh processes per policy (lowest to highest), after an unmeasured one. Policies "
        f"of 64x64 tanh with normalised observations. Loading includes the import of NumPy. `act` takes one "
        f"observation and returns the most likely action; {options.seconds:g} s of calls per process. "
        f"{machine.facts({})}"
    )
    return Report("api", markdown_table(["benchmark", "result", "target, below"], rows), notes)


def _saved(policy: Policy) -> SavedPolicy:
    weights: Weights = {
        "params": policy.init(seeding.rng(0, "weights")),
        "mean": np.zeros(policy.inputs, np.float32),
        "scale": np.ones(policy.inputs, np.float32),
    }
    return SavedPolicy(policy, weights, {"id": "bench"})


def _measured(path: Path, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-P", "-c", textwrap.dedent(MEASURE), str(path), str(seconds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=shoal_environment())
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _brief(one: dict[str, float]) -> str:
    return f"import {1e3 * one['import']:.1f} ms, load {1e3 * one['load']:.0f} ms, act {1e6 * one['act']:.1f} µs"


def _range(numbers: list[float], factor: float, unit: str) -> str:
    found = spread(factor * number for number in numbers)
    return "" if found is None else f"{found.middle:.1f} {unit} ({found.low:.1f} to {found.high:.1f})"
