"""Run your own training script as many processes under MPI. Guide: docs/spmd.md.

    from shoal import spmd

    spmd.launch(4)                            # run this script again as 4 processes ("ranks")
    spmd.seed_everything(1)                   # different random numbers on each rank
    batch = spmd.gather({"obs": obs, ...})    # the samples of all ranks, on rank 0
    spmd.broadcast(model)                     # rank 0's weights, on every rank

With a single process every call is a no-op and MPI is not needed. Heavy packages are loaded only when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.spmd.collectives import allgather, gather, mean, sum  # noqa: A004  users write spmd.sum
    from shoal.spmd.launching import launch
    from shoal.spmd.running import Running
    from shoal.spmd.seeds import own_seed, seed_everything
    from shoal.spmd.weights import average_gradients, broadcast
    from shoal.spmd.world import is_root, print0, rank, size

__all__ = [
    "Running",
    "allgather",
    "average_gradients",
    "broadcast",
    "gather",
    "is_root",
    "launch",
    "mean",
    "own_seed",
    "print0",
    "rank",
    "seed_everything",
    "size",
    "sum",
]

_HOMES = {
    "collectives": ("allgather", "gather", "mean", "sum"),
    "launching": ("launch",),
    "running": ("Running",),
    "seeds": ("own_seed", "seed_everything"),
    "weights": ("average_gradients", "broadcast"),
    "world": ("is_root", "print0", "rank", "size"),
}


def __getattr__(name: str) -> object:
    # Import late: `import shoal.spmd` stays cheap, and `launch` can set thread limits before NumPy is loaded.
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"shoal.spmd.{home}"), name)
            return globals()[name]
    raise AttributeError(f"module 'shoal.spmd' has no attribute {name!r}")
