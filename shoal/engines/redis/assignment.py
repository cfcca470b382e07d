"""Which worker works for which run.

No process hands out workers: every machine computes the same assignment from the same records and carries out its own
part.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.engines.redis.records import HeadRecord, MachineRecord, WorkerRecord


def assign(heads: Sequence[HeadRecord], machines: Sequence[MachineRecord]) -> dict[tuple[str, int], str]:
    """Map workers, by machine id and number, to run ids. Workers that are not in the result should wait.

    Fair: runs that have started get equal shares, to within one, and older runs the larger ones. A run that needs more
    workers than its share waits until other runs end. Steady: as few workers as possible are moved.
    """
    workers = [(machine, worker) for machine in sorted(machines, key=lambda m: m.id) for worker in machine.workers]
    # Workers that are being started count, or the death of one would move others.
    total = len(workers) + sum(machine.starting for machine in machines)
    quota = _quotas(_possible(heads, workers), total)
    chosen: dict[tuple[str, int], str] = {}
    for machine, worker in workers:
        if quota.get(worker.run, 0) and worker.run not in machine.refused_by:
            chosen[machine.id, worker.number] = worker.run
            quota[worker.run] -= 1
    for machine, worker in workers:
        open_to = [run for run, left in quota.items() if left and run not in machine.refused_by]
        if (machine.id, worker.number) not in chosen and open_to:
            run = max(open_to, key=lambda run: quota[run])  # of equals the oldest, which comes first
            chosen[machine.id, worker.number] = run
            quota[run] -= 1
    return chosen


def _possible(heads: Sequence[HeadRecord], workers: Sequence[tuple[MachineRecord, WorkerRecord]]) -> list[HeadRecord]:
    """Select the runs that at least one worker may work for, oldest first."""
    possible = [head for head in heads if any(head.id not in machine.refused_by for machine, _ in workers)]
    return sorted(possible, key=lambda head: (head.order, head.id))


def _quotas(heads: Sequence[HeadRecord], total: int) -> dict[str, int]:
    """Compute the number of workers each run should have, oldest first."""
    active = [head for head in heads if head.started]
    for head in heads:
        if not head.started and (not active or total // (len(active) + 1) >= head.need):
            active.append(head)
    active.sort(key=lambda head: (head.order, head.id))
    return {head.id: total // len(active) + (place < total % len(active)) for place, head in enumerate(active)}
