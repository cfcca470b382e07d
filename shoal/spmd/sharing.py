"""Divide the GPUs of each host among its ranks, through environment variables that frameworks read when they start.

By default JAX and TensorFlow reserve the memory of every GPU that they see, so ranks that see the same one fail. GPUs
are chosen twice. First from the launcher's variables, before MPI starts, because an MPI library may initialise CUDA,
which then ignores changes. Then from what all ranks see, because only this shows whether the launcher gave each rank
GPUs that no other rank sees.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.spmd.gpus import VisibleGpus, initialised_by, installed_gpus, visible_gpus
from shoal.spmd.launching import GPUS, divides_gpus, local_place

# JAX refuses two names of one setting, and a user who sets any of these has divided the memory already.
_JAX_MEMORY = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
}
_JAX_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_TENSORFLOW_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


class SeenGpus(NamedTuple):
    """Ids of the GPUs that one rank sees, and their host."""

    host: str
    gpus: tuple[str, ...]


def divide(ranks: Sequence[SeenGpus]) -> list[range]:
    """Choose for each rank which positions of its `gpus` it uses.

    Ranks that see the same GPUs divide them evenly and contiguously: with fewer ranks than GPUs, each uses an equal
    number; with more, neighbours share one.
    """
    groups: dict[SeenGpus, list[int]] = defaultdict(list)
    for r, seen in enumerate(ranks):
        groups[seen].append(r)
    chosen = [range(0)] * len(ranks)
    for seen, members in groups.items():
        gpus = len(seen.gpus)
        each = max(1, gpus // len(members))
        for place, r in enumerate(members):
            first = place * each if gpus >= len(members) else place * gpus // len(members)
            chosen[r] = range(first, min(first + each, gpus))
    return chosen


def sharers(ranks: Sequence[SeenGpus], chosen: Sequence[range]) -> list[int]:
    """Count for each rank the ranks on the busiest of its GPUs, itself included; 0 for a rank without a GPU."""
    uses = Counter((seen.host, seen.gpus[i]) for seen, mine in zip(ranks, chosen, strict=True) for i in mine)
    return [
        max((uses[seen.host, seen.gpus[i]] for i in mine), default=0) for seen, mine in zip(ranks, chosen, strict=True)
    ]


def memory_variables(variables: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Bound the memory of one of several `ranks` on a GPU, except where the user has set it."""
    new: dict[str, str] = {}
    if ranks > 1 and not variables.keys() & _JAX_MEMORY:
        new[_JAX_FRACTION] = f"{max(1, 90 // ranks) / 100:.2f}"
    if ranks > 1 and _TENSORFLOW_GROWTH not in variables:
        new[_TENSORFLOW_GROWTH] = "true"
    return new


class OwnGpus:
    """GPUs of this rank. Changes `variables`, the environment of this process."""

    def __init__(self, variables: MutableMapping[str, str], visible: VisibleGpus, initialised: str, host: str) -> None:
        self.variables = variables
        self.visible = visible
        self.initialised = initialised
        self.seen = SeenGpus(host, visible.ids)
        self._chosen = range(len(visible.ids))

    @classmethod
    def of_this_process(cls) -> OwnGpus:
        visible = VisibleGpus("", (), ())
        if divides_gpus(os.environ):
            visible = visible_gpus(os.environ, *installed_gpus(os.environ))
        return cls(os.environ, visible, initialised_by() if visible.ids else "", _host())

    def choose_before_mpi(self) -> None:
        """Choose as if all ranks of this host saw the same GPUs, if the launcher numbers the ranks of a host."""
        place = local_place(self.variables)
        if place is not None and not place.gpus_bound and not self.initialised:
            self._use(divide([self.seen] * place.size)[place.rank])

    def choose(self, rank: int, exchange: Callable[[bytes], list[str]]) -> None:
        """Choose by what all ranks see, and bound the memory of a GPU that several use. Every rank must call this."""
        offers = [json.loads(text) for text in exchange(json.dumps([*self.seen, self.initialised]).encode())]
        ranks = [SeenGpus(host, tuple(gpus)) for host, gpus, _ in offers]
        chosen = divide(ranks)
        used_by = sharers(ranks, chosen)
        if not self.initialised:
            self._use(chosen[rank])
            self.variables.update(memory_variables(self.variables, used_by[rank]))
        late = {
            r: by for r, (_, gpus, by) in enumerate(offers) if by and (len(chosen[r]) < len(gpus) or used_by[r] > 1)
        }
        if rank == 0 and late:
            print(_late(late), file=sys.stderr, flush=True)

    def _use(self, chosen: range) -> None:
        if chosen != self._chosen:
            self.variables[self.visible.variable] = ",".join(self.visible.entries[i] for i in chosen)
            self._chosen = chosen


def _late(ranks: Mapping[int, str]) -> str:
    first, by = next(iter(ranks.items()))
    others = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return (
        f"warning: the GPUs were not divided among the ranks, because {by} had already initialised them on rank "
        f"{first}{others}. Several ranks may now use the same GPU and run out of its memory. Call spmd.launch(n), or "
        "another function of shoal.spmd, before the first use of a GPU. If the script divides the GPUs itself, put "
        f"{GPUS}=all before the command."
    )


def _host() -> str:
    """Name this machine; containers on one host have the same name, and hosts never do."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
