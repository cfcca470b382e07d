"""Every rank but rank 0: one of them per machine runs a Ray node, as long as rank 0 needs it."""

from __future__ import annotations

import contextlib
import select
import signal
import time
from pathlib import Path
from typing import cast

from shoal.base import signals
from shoal.base.lifetime import Reaper
from shoal.commands.up.allocation import Allocation
from shoal.commands.up.link import RankLink, RankReport, StartNode, connect_to_leader, host_name, machine_id
from shoal.commands.up.node import LocalNode, NodeSpec
from shoal.errors import EngineError

_LOOK = 0.2  # seconds between looks at Ray


def follow(allocation: Allocation, folder: Path, deadline: float) -> int:
    """Obey rank 0 until it ends the job. Returns 0: the exit code of the job is rank 0's."""
    # Rank 0 gets stop signals too, and gives the driver time to save. If rank 0 dies, its connection ends.
    for number in signals.STOP:
        signal.signal(number, signal.SIG_IGN)
    link = connect_to_leader(allocation, folder, time.monotonic() + deadline)
    with contextlib.closing(Reaper()) as reaper, contextlib.closing(link.socket):
        Follower(allocation.rank, link, reaper, folder / "logs" / host_name(machine_id())).run()
    return 0


class Follower:
    """Obeys the orders of rank 0 and reports the state of the node."""

    def __init__(self, rank: int, link: RankLink, reaper: Reaper, logs: Path) -> None:
        self._rank, self._link, self._reaper, self._logs = rank, link, reaper, logs
        self._node: LocalNode | None = None
        self._reported = RankReport(state="", said="")

    def run(self) -> None:
        """Obey until the order to end."""
        while True:
            for order in self._orders():
                if order.get("do") == "node":
                    self._start_node(cast(StartNode, order))
                elif order.get("do") == "end":
                    self._end()
                    return
            if self._node is not None:
                self._report(self._node)

    def _orders(self) -> list[dict[str, object]]:
        """Return new messages of rank 0, waiting a moment for them."""
        orders, self._link.waiting = self._link.waiting, []
        if orders or not select.select([self._link.socket], [], [], _LOOK)[0]:
            return orders
        received = self._link.receive()
        if received is None:
            raise EngineError(f"rank {self._rank}: rank 0 is gone, so this rank ends too")
        return received

    def _start_node(self, order: StartNode) -> None:
        spec = NodeSpec(order["ip"], order["cores"], order["limit"], order["token"], order["address"], order["folder"])
        self._node = LocalNode.start(spec, self._reaper, self._logs / "ray-start.log")

    def _report(self, node: LocalNode) -> None:
        """Report that the node has joined or failed, once each."""
        before = self._reported["state"]
        if before == "failed":
            return
        failure = node.failure
        if failure:
            report = RankReport(state="failed", said=failure)
        elif before == "joined" or node.is_up:
            report = RankReport(state="joined", said="")
        else:
            return
        if report["state"] != before:
            self._reported = report
            self._link.send(report)

    def _end(self) -> None:
        if self._node is not None:
            self._node.keep_logs()
        self._reaper.close()
        self._link.send(RankReport(state="stopped", said=""))
