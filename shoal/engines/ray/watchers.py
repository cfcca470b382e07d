"""Watchers on other machines, seen from the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.engines import wire
from shoal.engines.ray.actors import NodeWatcher


class NodeWatchers:
    """One `NodeWatcher` actor per node, started when it is first needed."""

    def __init__(self, ray: Any, prefix: str) -> None:
        self._ray, self._prefix = ray, prefix
        self._handles: dict[str, Any] = {}
        self._ready: set[str] = set()

    def live_processes(self, node: str, pids: Sequence[int]) -> Any:
        """Ask which processes are alive; the result is Ray's reference to the encoded answer."""
        if node not in self._handles:
            self._handles[node] = self._start(node)
        return self._handles[node].live_processes.remote(bytes(wire.encode(list(pids))))

    def _start(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"name": f"{self._prefix}-watcher-{node[:6]}", "num_cpus": 0, "scheduling_strategy": strategy}
        return self._ray.remote(NodeWatcher).options(**options).remote()

    def is_ready(self, node: str) -> bool:
        """Whether the node's watcher has started and answered."""
        return node in self._ready

    def answered(self, node: str) -> None:
        if node in self._handles:
            self._ready.add(node)

    def forget(self, node: str) -> None:
        """Drop a watcher that has failed; the next question starts another."""
        self._handles.pop(node, None)
        self._ready.discard(node)

    def kill_if_stopped(self, node: str, pid: int) -> None:
        if node in self._handles:
            self._handles[node].kill_if_stopped.options(num_returns=0).remote(pid)

    def close(self) -> None:
        for handle in self._handles.values():
            self._ray.kill(handle)
