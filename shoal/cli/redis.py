"""The command `redis`: a server for workers that join and leave at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.cli.console import console, print_table, say
from shoal.cli.parsing import parse
from shoal.cli.worker import ServerArgs
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.commands.redis import RedisStatus
    from shoal.engines.redis.records import HeadRecord, MachineRecord


@dataclass(frozen=True)
class StartArgs:
    """Start a Redis server on this machine: loopback only, with a new password, and no data on disk."""

    port: int | None = None
    """Port (default: a free one)."""
    acl: bool = False
    """Create a user for each role (head, worker, admin) with only the permissions that the role needs."""


@dataclass(frozen=True)
class StatusArgs(ServerArgs):
    """Show the machines and runs on a server."""


@dataclass(frozen=True)
class FlushArgs(ServerArgs):
    """Remove all of Shoal's keys from a server. Heads and workers connect again by themselves; no result is lost."""


@dataclass(frozen=True)
class StopArgs:
    """Stop the server that `shoal redis start` started. Workers wait until it is back, or until you stop them."""


def redis(words: list[str]) -> int:
    """Run `shoal redis start`, `status`, `flush` or `stop`."""
    actions: dict[str, Callable[[list[str]], int]] = {
        "start": _start,
        "status": _status,
        "flush": _flush,
        "stop": _stop,
    }
    if not words or words[0] in ("-h", "--help"):
        print("usage: shoal redis start|status|flush|stop\n")
        print("  start    start a server on this machine, with safe settings")
        print("  status   show the machines and runs on a server")
        print("  flush    remove all of Shoal's data from a server; heads and workers connect again by themselves")
        print("  stop     stop the server that was started on this machine")
        return 0 if words else 2
    if words[0] not in actions:
        raise UsageError(f"there is no `shoal redis {words[0]}`, only {', '.join(actions)}")
    return actions[words[0]](words[1:])


def _start(words: list[str]) -> int:
    args = parse(StartArgs, words, "redis start")
    from shoal.commands.redis import start_server

    out = console()
    started = start_server(args.port, args.acl)
    say(out, f"Redis runs at {started.url} (pid {started.pid}); its password is in {started.connection_file}")
    for role, url in started.role_urls.items():
        say(out, f"  {role:6} {url}")
    say(out, "To offer workers:  shoal worker\nTo start a run:    shoal train ppo CartPole-v1 --engine redis")
    return 0


def _status(words: list[str]) -> int:
    server = parse(StatusArgs, words, "redis status").find()
    from shoal.commands.redis import read_status

    out = console()
    status = read_status(server)
    say(out, f"{server.url}: {len(status.machines)} machine(s), {len(status.heads)} run(s)")
    if status.machines:
        header = ["host", "pid", "version", "workers", "busy", "tasks/s", "last heartbeat", "state"]
        print_table(out, [header, *(_machine_row(machine, status) for machine in status.machines)])
    if status.heads:
        header = ["run", "host", "pid", "version", "epoch", "workers", "state"]
        print_table(out, [header, *(_run_row(head) for head in status.heads)])
    return 0


def _machine_row(machine: MachineRecord, status: RedisStatus) -> list[str]:
    busy = sum(bool(worker.run) for worker in machine.workers)
    state = ["working" if busy else "waiting"]
    state += [f"refused by {run}: {why}" for run, why in machine.refused_by.items()]
    state += [f"refused {machine.refusals} messages"] if machine.refusals else []
    return [
        machine.host, str(machine.pid), machine.version, str(len(machine.workers)), str(busy),
        f"{machine.speed:.1f}", f"{max(status.ages[machine.id], 0):.1f} s ago", "; ".join(state),
    ]  # fmt: skip


def _run_row(head: HeadRecord) -> list[str]:
    state = "training" if head.started else "waiting for workers"
    return [head.id, head.host, str(head.pid), head.version, str(head.epoch), str(head.have), state]


def _flush(words: list[str]) -> int:
    server = parse(FlushArgs, words, "redis flush").find()
    from shoal.commands.redis import flush_server

    out = console()
    say(out, f"{flush_server(server)} keys removed from {server.url}; heads and workers connect again by themselves")
    return 0


def _stop(words: list[str]) -> int:
    parse(StopArgs, words, "redis stop")
    from shoal.commands.redis import stop_server

    say(console(), f"the server at {stop_server()} has stopped")
    return 0
