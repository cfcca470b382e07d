"""Shoal: distributed reinforcement learning with the same results on every engine and any number of workers.

run = shoal.train("ppo", "CartPole-v1", steps=100_000, seed=1, workers=4)
policy = shoal.load(run)
action = policy.act(observation)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "Iteration",
    "LoadedPolicy",
    "Run",
    "Shared",
    "ShoalError",
    "SweepResult",
    "__version__",
    "engine",
    "errors",
    "evaluate",
    "iterate",
    "load",
    "open_run",
    "sweep",
    "train",
]

if TYPE_CHECKING:
    from shoal import errors
    from shoal.api.sweeping import sweep
    from shoal.api.training import Iteration, Run, evaluate, iterate, open_run, train
    from shoal.commands.sweep.results import SweepResult
    from shoal.engines import make as engine
    from shoal.engines.base import Engine
    from shoal.engines.wire import Shared
    from shoal.errors import ShoalError
    from shoal.policies.loaded import LoadedPolicy
    from shoal.runs.load import load

_HOMES = {
    "Engine": "shoal.engines.base:Engine",
    "Iteration": "shoal.api.training:Iteration",
    "LoadedPolicy": "shoal.policies.loaded:LoadedPolicy",
    "Run": "shoal.api.training:Run",
    "Shared": "shoal.engines.wire:Shared",
    "ShoalError": "shoal.errors:ShoalError",
    "SweepResult": "shoal.commands.sweep.results:SweepResult",
    "engine": "shoal.engines:make",
    "errors": "shoal.errors",
    "evaluate": "shoal.api.training:evaluate",
    "iterate": "shoal.api.training:iterate",
    "load": "shoal.runs.load:load",
    "open_run": "shoal.api.training:open_run",
    "sweep": "shoal.api.sweeping:sweep",
    "train": "shoal.api.training:train",
}
"""Public name -> where it is defined. Imported on first use: `import shoal` is part of every start of a worker."""


def __getattr__(name: str) -> object:
    home, _, attribute = _HOMES.get(name, "").partition(":")
    if not home:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    module = importlib.import_module(home)
    return getattr(module, attribute) if attribute else module
