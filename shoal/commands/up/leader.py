"""Rank 0: gather the ranks, bring up the nodes, run the driver, end everything."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shoal.base.lifetime import Reaper
from shoal.commands.up import link
from shoal.commands.up.allocation import Allocation
from shoal.commands.up.node import HERE, Node
from shoal.errors import EngineError, Stopped, UsageError
from shoal.spmd.launching import without_rank

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
    """From the start until the driver has to be stopped."""


def lead(allocation: Allocation, orders: Orders) -> int:
    """Bring the cluster up, run the driver on it, and take it down. The driver's exit code."""
    with contextlib.ExitStack() as stack:
        head = _Head(allocation, orders, stack.enter_context(_signals()))
        stack.callback(head.ranks.close)
        stack.callback(head.reaper.close)
        try:
            code = head.drive(head.bring_up())
        finally:
            head.say("stopping all nodes")
            head.stop_others()
        stack.close()
        head.say(f"all is stopped; logs are in {orders.folder / 'logs'}")
    return code


class _Signals:
    """The first signal to stop, for whoever waits. More of them change nothing: all is being stopped already."""

    def __init__(self) -> None:
        self.number = 0

    def handle(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number


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


class _Head:
    """Rank 0 at work."""

    def __init__(self, allocation: Allocation, orders: Orders, signals: _Signals) -> None:
        self.allocation, self.orders, self.signals = allocation, orders, signals
        self.begun = time.monotonic()
        self.ranks = link.Ranks(orders.folder, allocation.size)
        self.reaper = Reaper()

    def say(self, text: str) -> None:
        """One line, with the time since the start."""
        print(f"[shoal up {time.monotonic() - self.begun:6.1f} s] {text}", flush=True)

    # Up -------------------------------------------------------------------------------------------------------

    def bring_up(self) -> Node:
        """Ray on every machine; its head."""
        job, size = self.allocation, self.allocation.size
        if size > 1:
            self.say(f"job {job.job} of {job.launcher}: {size} ranks; waiting for {size - 1}")
            self._wait(self._missing_ranks, "ranks")
        here = link.machine()
        leaders: dict[str, link.Member] = {}
        for _, member in sorted(self.ranks.members.items()):
            if member.machine != here:
                leaders.setdefault(member.machine, member)
        ip = self.ranks.reached_at if leaders else HERE
        self.say(f"{size} rank(s) on {1 + len(leaders)} machine(s); starting Ray's head on {ip}")
        _check_port(ip, self.orders.port)
        node = Node(
            self.reaper,
            ip=ip,
            cores=self._cores(here, job.cores),
            limit=job.limit,
            token=self.ranks.token,
            log=self.orders.folder / "logs" / link.name(here) / "ray-start.log",
            port=self.orders.port,
        )
        try:
            self._wait(lambda: _starting(node), "Ray's head")
            self.say(f"Ray's head is up at {node.address} with {node.cpus} CPUs")
            self._join(leaders, node)
        except BaseException:
            node.keep_logs()
            raise
        return node

    def _join(self, leaders: dict[str, link.Member], node: Node) -> None:
        """Have one rank on each other machine start a node, and wait for them."""
        for machine, leader in leaders.items():
            order = {"do": "node", "address": node.address, "folder": node.folder, "token": self.ranks.token}
            place = {"ip": leader.ip, "cores": self._cores(machine, leader.cores), "limit": leader.limit}
            leader.line.send(order | place)
        if leaders:
            self._wait(lambda: _joining(leaders), "nodes")
            self.say(f"all {1 + len(leaders)} nodes have joined")

    def _cores(self, machine: str, own: Sequence[int]) -> list[int]:
        """Cores of a machine that its ranks have together: a launcher may bind each to a few."""
        members = self.ranks.members.values()
        return sorted(set(own).union(*(one.cores for one in members if one.machine == machine)))

    def _wait(self, left: Callable[[], tuple[int, str]], what: str) -> None:
        """Wait until nobody is left, with a line now and then; `left` gives their number and names."""
        deadline = self.orders.deadline
        total, _ = left()
        begun = said_at = time.monotonic()
        said = total
        while True:
            count, names = left()
            now = time.monotonic()
            if count == 0:
                return
            if (count < said and now - said_at >= _TALK) or now - said_at >= _REPEAT:
                said, said_at = count, now
                self.say(f"{what}: {total - count} of {total}, waiting for {names}")
            if now - begun > deadline:
                raise EngineError(
                    f"{what}: {total - count} of {total} came within {deadline:g} s; not there: {names}. Look at "
                    f"their logs, or give them more time: --deadline {2 * deadline:g}"
                )
            if self.signals.number:
                raise Stopped(self.signals.number)
            self.ranks.poll(_LOOK)

    def _missing_ranks(self) -> tuple[int, str]:
        for member in self.ranks.members.values():
            if member.state == "gone":
                raise EngineError(f"rank {member.rank} on {link.name(member.machine)} came and was gone again")
        missing = self.ranks.missing
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return len(missing), f"rank {', '.join(map(str, missing[:8]))}{more}"

    # The driver -----------------------------------------------------------------------------------------------

    def drive(self, node: Node) -> int:
        """Run the driver to its end, to a signal or to the end of the job's time."""
        address, orders, signals = node.address, self.orders, self.signals
        words = [word.replace("{address}", address) for word in orders.driver]
        variables = without_rank(os.environ) | node.variables | {"RAY_ADDRESS": address}
        try:
            driver = subprocess.Popen(words, env=variables, start_new_session=True)
        except OSError as error:
            raise UsageError(f"the driver {words[0]!r} cannot be started: {error.strerror}") from None
        self.say(f"driver (pid {driver.pid}): {shlex.join(words)}")
        asked_at, late = None, False
        while (code := driver.poll()) is None:
            news, now = self.ranks.poll(_LOOK), time.monotonic()
            if asked_at is None:
                self._tell_of_losses(news)
                if node.ended:
                    self.say(f"Ray's head is gone. {node.ended}")
                    signals.number = signals.number or signal.SIGTERM
                elif orders.seconds is not None and now - self.begun >= orders.seconds and not signals.number:
                    late = True
                    self.say("the time of the job is nearly up")
                    signals.number = signal.SIGTERM
                if signals.number:
                    asked_at = now
                    name = signal.Signals(signals.number).name
                    self.say(f"{name} goes to the driver, which has {orders.grace:g} s to save and end")
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(driver.pid, signals.number)
            elif now - asked_at > orders.grace:
                driver.kill()
        # A driver that is a shell ends at once; what it has started may still be saving.
        while asked_at is not None and _lives(driver.pid) and time.monotonic() - asked_at < orders.grace:
            time.sleep(_LOOK)
        node.keep_logs()
        code = 128 - code if code < 0 else code
        self.say(f"the driver ended with exit code {code}")
        if late and code:
            self.say(f"exit code {REQUEUE}: start the job again to go on")
            return REQUEUE
        return code

    def _tell_of_losses(self, news: Sequence[link.Member]) -> None:
        for member in news:
            if member.state in ("failed", "gone"):
                who = f"rank {member.rank} on {link.name(member.machine)}"
                self.say(f"{who} is {member.state}; the driver goes on. {member.said}".rstrip())

    # Down -----------------------------------------------------------------------------------------------------

    def stop_others(self) -> None:
        """Have all other ranks end what they started, and wait for their word."""
        self.ranks.tell({"do": "end"})
        deadline = time.monotonic() + _STOPPING
        while left := [one for one in self.ranks.members.values() if one.state not in ("stopped", "gone")]:
            if time.monotonic() > deadline:
                names = ", ".join(f"{one.rank} ({link.name(one.machine)})" for one in left)
                self.say(f"no word from rank {names}; its reaper ends what is left there")
                return
            self.ranks.poll(_LOOK)


def _lives(group: int) -> bool:
    """Whether any process of a group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


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
