"""The nodes of a Ray cluster: how many workers each holds, and which one gets the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RayNode:
    """A live node."""

    address: str
    capacity: int
    """Workers that fit into the node's total resources."""
    refused: bool = False
    """Whether workers there would compute other bits than the head."""


class RayNodes(dict[str, RayNode]):
    """Live nodes by Ray's id. `demand` is what one worker takes of a node's resources."""

    def __init__(self, ray: Any, demand: Mapping[str, float], placement: str) -> None:
        super().__init__()
        self._ray, self._demand, self._placement = ray, demand, placement

    def refresh(self) -> set[str]:
        """Add and remove nodes as Ray reports them, and return the ids of those that have left."""
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for name, node in alive.items():
            resources: Mapping[str, float] = node["Resources"]
            capacity = int(min(resources.get(resource, 0.0) // amount for resource, amount in self._demand.items()))
            self.setdefault(name, RayNode(node["NodeManagerAddress"], capacity)).capacity = capacity
        left = set(self) - set(alive)
        for name in left:
            del self[name]
        return left

    @property
    def room(self) -> int:
        """Workers that fit on all nodes that are not refused."""
        return sum(node.capacity for node in self.values() if not node.refused)

    @property
    def any_refused(self) -> bool:
        """Whether Ray must be kept from choosing a node itself."""
        return any(node.refused for node in self.values())

    def choose(self, workers: Mapping[str, int]) -> str | None:
        """Choose a node with room, given the workers on each: the emptiest to spread, the fullest to pack."""
        load = {
            name: workers.get(name, 0) / node.capacity
            for name, node in self.items()
            if workers.get(name, 0) < node.capacity and not node.refused
        }
        if not load:
            return None
        order = sorted(load, key=lambda name: (load[name], self[name].capacity, name))
        return order[-1 if self._placement == "pack" else 0]  # packing begins with the largest node
