"""Overhead of the checks in `shoal.spmd` compared with bare mpi4py.

    python -m bench.spmd [--processes 2] [--rounds 300]

Bare is what one would write by hand: mpi4py's buffer calls, with row counts exchanged before a gather and new memory
for its result each time. Both are timed in turns in the same processes, from a barrier until the slowest rank is done.
Prints medians and, for noisy machines, the fastest tenth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from shoal import spmd


def seconds(call: Callable[[], object]) -> float:
    """Time a call from a barrier until the slowest rank is done."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    begun = time.perf_counter()
    call()
    slowest: float = MPI.COMM_WORLD.allreduce(time.perf_counter() - begun, MPI.MAX)
    return slowest


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300)
    wanted = parser.parse_args()
    spmd.launch(wanted.processes)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    weights = np.ones(10 * 2**20 // 4, np.float32)
    layers = {
        f"layer{i}": np.ones((256, 256), np.float32) for i in range(40)
    }  # the same 10 MB, in the arrays of a network
    rows = np.ones((2**20 // 32, 8), np.float32)
    small = np.ones(100)

    def bare_broadcasts() -> None:
        for layer in layers.values():
            comm.Bcast(layer)

    def bare_gather() -> None:
        counts = np.empty(comm.size, np.int64)
        comm.Gather(np.array([rows.size]), counts)
        if comm.rank == 0:
            result = np.empty((int(counts.sum()) // 8, 8), np.float32)
            comm.Gatherv(rows, [result, counts, np.cumsum(counts) - counts, MPI.FLOAT])
        else:
            comm.Gatherv(rows, None)

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "broadcast 10 MB, one array": (lambda: comm.Bcast(weights), lambda: spmd.broadcast(weights)),
        "broadcast 10 MB, 40 arrays": (bare_broadcasts, lambda: spmd.broadcast(layers)),
        "gather 1 MB of each": (bare_gather, lambda: spmd.gather({"rows": rows})),
        "sum of 100 numbers": (lambda: comm.Allreduce(small, small.copy()), lambda: spmd.sum(small)),
    }
    for name, (bare, ours) in pairs.items():
        times = np.array([[seconds(bare), seconds(ours)] for _ in range(wanted.rounds)])
        for what, share in (("median", 50), ("fastest tenth", 10)):
            bare_us, spmd_us = np.percentile(times, share, axis=0) * 1e6
            spmd.print0(f"{name}, {what}: bare {bare_us:.0f} us, spmd {spmd_us:.0f} us, ratio {spmd_us / bare_us:.2f}")


if __name__ == "__main__":
    main()
