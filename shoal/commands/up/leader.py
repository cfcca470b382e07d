"""Rank 0: wait for the ranks, start Ray on every machine, run the driver, and stop everything."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from shoal.base import signals
from shoal.base.lifetime import Reaper
from shoal.commands.up.allocation import Allocation
from shoal.commands.up.driver import Driver
from shoal.commands.up.link import Order, StartNode, host_name, machine_id
from shoal.commands.up.node import LOOPBACK_IP, LocalNode, NodeSpec
from shoal.commands.up.roster import Member, Roster
from shoal.errors import EngineError, Stopped, UsageError
from shoal.spmd.launching import without_rank

REQUEUE = 75
"""Exit code when the driver was stopped because the job's time was nearly up: start the job again to continue."""
_STOP_SECONDS = 20.0  # for the other ranks to stop
_LOOK = 0.1  # seconds to wait for news of other ranks
_PROGRESS_EVERY = 1.0  # seconds between progress lines, at least
_REPEAT_EVERY = 10.0  # seconds after which a progress line is printed without progress


@dataclass(frozen=True)
class JobOptions:
    """The user's options for rank 0."""

    driver: Sequence[str]
    folder: Path
    deadline: float
    """Seconds for all ranks to connect, and for all nodes to start."""
    port: int
    grace: float
    """Seconds for the driver to end after a signal."""
    seconds: float | None
    """Seconds from the start until the driver is stopped; None is no limit."""


class _Pending(NamedTuple):
    """What is still waited for."""

    remaining: int
    names: str


class _StopSignal:
    """The first stop signal; later ones change nothing, because everything is being stopped already."""

    number = 0

    def handle(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number


def lead(allocation: Allocation, options: JobOptions) -> int:
    """Start the cluster, run the driver on it, and stop the cluster. Returns the driver's exit code."""
    stop = _StopSignal()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.handled_by(stop.handle))
        leader = Leader(allocation, options, stop)
        stack.callback(leader.roster.close)
        stack.callback(leader.reaper.close)
        try:
            code = leader.drive(leader.start_nodes())
        finally:
            leader.report("stopping all nodes")
            leader.stop_others()
        stack.close()
        leader.report(f"all nodes are stopped; logs are in {options.folder / 'logs'}")
    return code


class Leader:
    """The phases of a job on rank 0."""

    def __init__(self, allocation: Allocation, options: JobOptions, stop: _StopSignal) -> None:
        self.allocation, self.options, self._stop = allocation, options, stop
        self._begun = time.monotonic()
        self.roster = Roster(options.folder, allocation.size)
        self.reaper = Reaper()

    def report(self, text: str) -> None:
        """Print one line with the time since the start."""
        # In one write: the driver prints to the same file, and its output must not come between text and line end.
        print(f"[shoal up {time.monotonic() - self._begun:6.1f} s] {text}\n", end="", flush=True)

    # Start ----------------------------------------------------------------------------------------------------

    def start_nodes(self) -> LocalNode:
        """Start Ray on every machine, and return its head node, which is on this one."""
        job, size = self.allocation, self.allocation.size
        if size > 1:
            self.report(f"job {job.job} of {job.launcher}: {size} ranks; waiting for {size - 1}")
            self._wait(self._missing_ranks, "ranks")
        here = machine_id()
        others = self._first_ranks(here)
        ip = self.roster.reached_at if others else LOOPBACK_IP
        self.report(f"{size} rank(s) on {1 + len(others)} machine(s); starting Ray's head node on {ip}")
        _check_port(ip, self.options.port)
        spec = NodeSpec(ip, self._cores(here, job.cores), job.limit, self.roster.token, port=self.options.port)
        log = self.options.folder / "logs" / host_name(here) / "ray-start.log"
        node = LocalNode.start(spec, self.reaper, log)
        try:
            self._wait(lambda: _starting(node), "Ray's head node")
            self.report(f"Ray's head node is up at {node.address} with {spec.cpus} CPUs")
            self._start_other_nodes(others, node)
        except BaseException:
            node.keep_logs()
            raise
        return node

    def _first_ranks(self, here: str) -> list[Member]:
        """Pick the first rank of each other machine, which starts the node there."""
        first: dict[str, Member] = {}
        for _, member in sorted(self.roster.members.items()):
            if member.machine != here:
                first.setdefault(member.machine, member)
        return list(first.values())

    def _start_other_nodes(self, members: Sequence[Member], node: LocalNode) -> None:
        for member in members:
            order: StartNode = {
                "do": "node",
                "ip": member.ip,
                "cores": self._cores(member.machine, member.cores),
                "limit": member.limit,
                "token": self.roster.token,
                "address": node.address,
                "folder": node.folder,
            }
            member.link.send(order)
        if members:
            self._wait(lambda: _joining(members), "nodes")
            self.report(f"all {1 + len(members)} nodes have joined")

    def _cores(self, machine: str, own: Sequence[int]) -> list[int]:
        """Unite the cores of all ranks of a machine: a launcher may bind each rank to a few."""
        members = self.roster.members.values()
        return sorted(set(own).union(*(member.cores for member in members if member.machine == machine)))

    def _wait(self, check: Callable[[], _Pending], what: str) -> None:
        """Wait until nothing is pending, and print progress."""
        deadline = self.options.deadline
        total = check().remaining
        begun = printed_at = time.monotonic()
        printed = total
        while True:
            pending = check()
            now = time.monotonic()
            if pending.remaining == 0:
                return
            done = total - pending.remaining
            silent = now - printed_at
            if (pending.remaining < printed and silent >= _PROGRESS_EVERY) or silent >= _REPEAT_EVERY:
                printed, printed_at = pending.remaining, now
                self.report(f"{what}: {done} of {total}, waiting for {pending.names}")
            if now - begun > deadline:
                raise EngineError(
                    f"{what}: {done} of {total} ready after {deadline:g} s; missing: {pending.names}. Check their "
                    f"logs, or allow more time: --deadline {2 * deadline:g}"
                )
            if self._stop.number:
                raise Stopped(self._stop.number)
            self.roster.poll(_LOOK)

    def _missing_ranks(self) -> _Pending:
        for member in self.roster.members.values():
            if member.state == "gone":
                raise EngineError(f"rank {member.rank} on {member.host} connected and then died. Check its output")
        missing = self.roster.missing
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return _Pending(len(missing), f"rank {', '.join(map(str, missing[:8]))}{more}")

    # Run ------------------------------------------------------------------------------------------------------

    def drive(self, node: LocalNode) -> int:
        """Run the driver until it ends, a signal arrives, Ray fails, or the job's time is nearly up."""
        words = [word.replace("{address}", node.address) for word in self.options.driver]
        variables = without_rank(os.environ) | dict(node.variables) | {"RAY_ADDRESS": node.address}
        driver = Driver.start(words, variables, self.options.grace)
        self.report(f"driver (pid {driver.pid}): {driver.command}")
        is_late = False
        while (code := driver.poll()) is None:
            news = self.roster.poll(_LOOK)
            if driver.is_stopping:
                driver.kill_when_overdue()
                continue
            self._report_losses(news)
            if node.failure:
                self.report(f"Ray's head node has failed. {node.failure}")
                self._stop.number = self._stop.number or signal.SIGTERM
            elif self._is_time_up() and not self._stop.number:
                is_late = True
                self.report("the time of the job is nearly up")
                self._stop.number = signal.SIGTERM
            if self._stop.number:
                name = signal.Signals(self._stop.number).name
                self.report(f"sending {name} to the driver, which has {self.options.grace:g} s to save and end")
                driver.ask_to_stop(self._stop.number)
        driver.wait_for_group()
        node.keep_logs()
        self.report(f"the driver ended with exit code {code}")
        if is_late and code:
            self.report(f"exit code {REQUEUE}: start the job again to continue")
            return REQUEUE
        return code

    def _is_time_up(self) -> bool:
        limit = self.options.seconds
        return limit is not None and time.monotonic() - self._begun >= limit

    def _report_losses(self, news: Sequence[Member]) -> None:
        for member in news:
            if member.state in ("failed", "gone"):
                what = "lost its node" if member.state == "failed" else "died"
                text = f"rank {member.rank} on {member.host} {what}; the driver continues. {member.failure}"
                self.report(text.rstrip())

    # Stop -----------------------------------------------------------------------------------------------------

    def stop_others(self) -> None:
        """Have all other ranks stop what they started, and wait until they have."""
        self.roster.broadcast(Order(do="end"))
        deadline = time.monotonic() + _STOP_SECONDS
        members = self.roster.members.values()
        while left := [member for member in members if member.state not in ("stopped", "gone")]:
            if time.monotonic() > deadline:
                names = ", ".join(f"{member.rank} ({member.host})" for member in left)
                self.report(f"no answer from rank {names}; the reaper there stops what is left")
                return
            self.roster.poll(_LOOK)


def _starting(node: LocalNode) -> _Pending:
    if node.failure:
        raise EngineError(node.failure)
    return _Pending(0, "") if node.is_up else _Pending(1, f"`ray start`, whose output is in {node.log}")


def _joining(members: Sequence[Member]) -> _Pending:
    pending = []
    for member in members:
        if member.state in ("failed", "gone"):
            reason = member.failure or "The rank died"
            raise EngineError(f"the node on {member.host} (rank {member.rank}) did not start. {reason}")
        if member.state != "joined":
            pending.append(f"{member.host} (rank {member.rank})")
    return _Pending(len(pending), ", ".join(pending))


def _check_port(ip: str, port: int) -> None:
    if not port:
        return
    try:
        socket.create_server((ip, port)).close()
    except OSError as error:
        raise UsageError(
            f"port {port} on {ip} cannot be used: {error.strerror}. Another Ray may be using it (to check: "
            f"ss -ltnp 'sport = {port}'). Without --port, any free one is used"
        ) from None
