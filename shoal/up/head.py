"""Rank 0: gather the ranks, bring up the nodes, run the driver, end everything."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shoal.errors import EngineError, Stopped, UsageError
from shoal.up import link
from shoal.up.allocation import Allocation
from shoal.up.node import LOOPBACK, Keeper, Node

REQUEUE = 75
"""Exit code of a driver that was stopped because the time of the job was up: start the job again to go on."""
_STOPPING = 20.0  # seconds for other machines to end
_LOOK = 0.1
_TALK = 1.0  # seconds between progress lines, at least
_REPEAT = 10.0  # seconds after which a wait says again for whom


@dataclass(frozen=True)
class Orders:
    """What the user wants of rank 0."""

    driver: Sequence[str]
    folder: Path
    deadline: float
    """Seconds for all ranks and nodes to come."""
    port: int
    grace: float
    """Seconds for the driver to end after a signal."""
    seconds: float | None
    """Until the driver has to be stopped."""


def lead(allocation: Allocation, orders: Orders) -> int:
    """Bring the cluster up, run the driver on it, and take it down. The driver's exit code."""
    stages = _Stages()
    with _signals() as signals, contextlib.closing(link.Ranks(orders.folder, allocation.size)) as ranks:
        with contextlib.closing(Keeper()) as keeper:
            try:
                node = _bring_up(allocation, orders, ranks, keeper, stages, signals)
                code = _drive(orders, node, keeper, ranks, stages, signals)
            finally:
                stages.say("stopping all nodes")
                ranks.tell({"do": "end"})
                _wait_for_stops(ranks, stages)
        stages.say(f"all is stopped; logs are in {orders.folder / 'logs'}")
    return code


class _Stages:
    """Lines with the time since the start."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[shoal up {time.monotonic() - self._begun:6.1f} s] {text}", flush=True)


class _Signals:
    """Signals to stop, for whoever waits. A second one of a kind changes nothing: all is being stopped already."""

    def __init__(self) -> None:
        self.number = 0

    def handle(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number

    def check(self) -> None:
        if self.number:
            raise Stopped(self.number)


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    one = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.signal(number, one.handle) for number in numbers}
    try:
        yield one
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    ranks: link.Ranks,
    stages: _Stages,
    signals: _Signals,
    deadline: float,
    left: Callable[[], tuple[int, str]],
    what: str,
) -> None:
    """Wait until nobody is left, with a line now and then; `left` gives their number and names."""
    total, _ = left()
    said, said_at = total, time.monotonic()
    end = time.monotonic() + deadline
    while True:
        count, names = left()
        now = time.monotonic()
        if (0 < count < said and now - said_at >= _TALK) or now - said_at >= _REPEAT:
            said, said_at = count, now
            stages.say(f"{what}: {total - count} of {total}, waiting for {names}")
        if count == 0:
            return
        if now > end:
            raise EngineError(
                f"{what}: {total - count} of {total} came within {deadline:g} s; not there: {names}. Look at "
                f"their logs, or give them more time: --deadline {2 * deadline:g}"
            )
        signals.check()
        ranks.poll(_LOOK)


def _bring_up(
    allocation: Allocation,
    orders: Orders,
    ranks: link.Ranks,
    keeper: Keeper,
    stages: _Stages,
    signals: _Signals,
) -> Node:
    """Ray on every machine; its head."""
    others = allocation.size - 1
    if others:
        stages.say(f"job {allocation.job} of {allocation.launcher}: {allocation.size} ranks; waiting for {others}")
        _wait(ranks, stages, signals, orders.deadline, lambda: _missing_ranks(ranks), "ranks")
    here = link.machine()
    leaders: dict[str, link.Member] = {}
    for _, member in sorted(ranks.members.items()):
        if member.machine != here:
            leaders.setdefault(member.machine, member)
    ip = ranks.reached_at if leaders else LOOPBACK
    stages.say(f"{allocation.size} rank(s) on {1 + len(leaders)} machine(s); starting Ray's head on {ip}")
    _check_port(ip, orders.port)
    log = orders.folder / "logs" / link.name(here) / "ray-start.log"
    cores = _cores(here, allocation.cores, ranks)
    node = Node(keeper, ip=ip, cores=cores, limit=allocation.limit, token=ranks.token, log=log, port=orders.port)
    try:
        _wait(ranks, stages, signals, orders.deadline, lambda: _starting(node), "Ray's head")
        stages.say(f"Ray's head is up at {node.address()} with {node.cpus} CPUs")
        _join(leaders, node, ranks, orders, stages, signals)
    except BaseException:
        node.keep_logs(log.parent)
        raise
    return node


def _join(
    leaders: dict[str, link.Member],
    node: Node,
    ranks: link.Ranks,
    orders: Orders,
    stages: _Stages,
    signals: _Signals,
) -> None:
    """Have one rank on each other machine start a node, and wait for them."""
    for machine, leader in leaders.items():
        cores = _cores(machine, leader.cores, ranks)
        order = {"do": "node", "address": node.address(), "ip": leader.ip, "cores": cores, "limit": leader.limit}
        leader.line.send(order | {"token": ranks.token, "folder": node.folder})
    if leaders:
        _wait(ranks, stages, signals, orders.deadline, lambda: _joining(leaders), "nodes")
        stages.say(f"all {1 + len(leaders)} nodes have joined")


def _cores(machine: str, own: Sequence[int], ranks: link.Ranks) -> list[int]:
    """Cores of a machine that its ranks have together: a launcher may bind each to a few."""
    return sorted(set(own).union(*(one.cores for one in ranks.members.values() if one.machine == machine)))


def _missing_ranks(ranks: link.Ranks) -> tuple[int, str]:
    for member in ranks.members.values():
        if member.state == "gone":
            raise EngineError(f"rank {member.rank} on {link.name(member.machine)} came and was gone again")
    missing = ranks.missing
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return len(missing), f"rank {', '.join(map(str, missing[:8]))}{more}"


def _starting(node: Node) -> tuple[int, str]:
    if node.ended:
        raise EngineError(node.ended)
    return (0, "") if node.up else (1, f"`ray start`, whose words are in {node.log}")


def _joining(leaders: dict[str, link.Member]) -> tuple[int, str]:
    left = []
    for machine, member in leaders.items():
        name = link.name(machine)
        if member.state in ("failed", "gone"):
            raise EngineError(f"the node on {name} (rank {member.rank}) did not start. {member.said or 'It is gone'}")
        if member.state != "joined":
            left.append(f"{name} (rank {member.rank})")
    return len(left), ", ".join(left)


def _check_port(ip: str, port: int) -> None:
    if not port:
        return
    try:
        socket.create_server((ip, port)).close()
    except OSError as error:
        raise UsageError(
            f"port {port} on {ip} cannot be used: {error.strerror}. Another Ray may be there (to see it: "
            f"ss -ltnp 'sport = {port}'). Leave --port out, and a free one is found"
        ) from None


def _drive(
    orders: Orders,
    node: Node,
    keeper: Keeper,
    ranks: link.Ranks,
    stages: _Stages,
    signals: _Signals,
) -> int:
    """Run the driver to its end, to a signal or to the end of the job's time."""
    address = node.address()
    words = [word.replace("{address}", address) for word in orders.driver]
    variables = keeper.variables(node.variables | {"RAY_ADDRESS": address})
    until = None if orders.seconds is None else time.monotonic() + orders.seconds
    try:
        driver = subprocess.Popen(words, env=variables, start_new_session=True)
    except OSError as error:
        raise UsageError(f"the driver {words[0]!r} cannot be started: {error.strerror}") from None
    stages.say(f"driver (pid {driver.pid}): {' '.join(words)}")
    asked_at, late = None, False
    while (code := driver.poll()) is None:
        now = time.monotonic()
        for member in ranks.poll(_LOOK):
            if member.state in ("failed", "gone") and asked_at is None:
                who = f"rank {member.rank} on {link.name(member.machine)}"
                stages.say(f"{who} is {member.state}; the driver goes on. {member.said}")
        if node.ended and asked_at is None:
            stages.say(f"Ray's head is gone. {node.ended}")
            signals.number = signals.number or signal.SIGTERM
        if until is not None and now >= until and asked_at is None and not signals.number:
            late = True
            stages.say("the time of the job is nearly up: asking the driver to save and end")
            signals.number = signal.SIGTERM
        if signals.number and asked_at is None:
            asked_at = now
            stages.say(f"{signal.Signals(signals.number).name}: passed on to the driver, which has {orders.grace:g} s")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signals.number)
        if asked_at is not None and now - asked_at > orders.grace:
            driver.kill()
    node.keep_logs(node.log.parent)
    code = 128 - code if code < 0 else code
    stages.say(f"the driver ended with exit code {code}")
    if late and code:
        stages.say(f"exit code {REQUEUE}: start the job again to go on")
        return REQUEUE
    return code


def _wait_for_stops(ranks: link.Ranks, stages: _Stages) -> None:
    deadline = time.monotonic() + _STOPPING
    while left := [one for one in ranks.members.values() if one.state not in ("stopped", "gone")]:
        if time.monotonic() > deadline:
            names = ", ".join(f"{one.rank} ({link.name(one.machine)})" for one in left)
            stages.say(f"no word from rank {names}; its keeper ends what is left there")
            return
        ranks.poll(_LOOK)
