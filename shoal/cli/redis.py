"""The command `redis`: a server for workers that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.cli.parsing import console, parse, say, table
from shoal.cli.worker import ServerArgs
from shoal.errors import UsageError

if TYPE_CHECKING:
    import redis as redis_py

    from shoal.engines.redis.address import Address


@dataclass(frozen=True)
class StartArgs:
    """Start a server on this machine: loopback only, with a new password, nothing kept on disk."""

    port: int | None = None
    """Its port; a free one unless told."""
    acl: bool = False
    """Make a user for each role (head, worker, admin), which may do no more than that role needs."""


def redis(words: list[str]) -> int:
    """A server of one's own, and what is on a server."""
    actions: dict[str, Callable[[list[str]], int]] = {
        "start": _start,
        "status": _status,
        "flush": _flush,
        "stop": _stop,
    }
    if not words or words[0] in ("-h", "--help"):
        print("usage: shoal redis start|status|flush|stop\n")
        print("  start    start a server on this machine, with safe settings")
        print("  status   which machines and runs there are")
        print("  flush    forget everything; heads and workers begin anew by themselves")
        print("  stop     stop the server that was started here")
        return 0 if words else 2
    if words[0] not in actions:
        raise UsageError(f"there is no `shoal redis {words[0]}`, only {', '.join(actions)}")
    return actions[words[0]](words[1:])


def _start(words: list[str]) -> int:
    wanted = parse(StartArgs, words, "redis start")
    from shoal.engines.redis.address import state_folder
    from shoal.engines.redis.local_server import ROLES, LocalServer

    out = console()
    local = LocalServer(state_folder())
    if local.running():
        raise UsageError(f"a server is running at {local.address.url} already. To stop it, type: shoal redis stop")
    if wanted.port is not None and not 0 < wanted.port < 2**16:
        raise UsageError(f"port must be in 1..65535, not {wanted.port}")
    local.configure(wanted.port, wanted.acl)
    process = local.launch(detached=True)
    process.returncode = 0  # it is not this process's to wait for
    url = local.address.url
    say(out, f"Redis runs at {url} (pid {process.pid}); its password is in {local.connection_file}")
    if wanted.acl:
        for role in ROLES:
            role_url = url.replace("admin@", f"{role}@")
            say(out, f"  {role:6} {role_url}?password_file={local.password_file(role)}")
    say(
        out,
        "To work for runs, type:  shoal worker\nTo start a run, type:    shoal train ppo CartPole-v1 --engine redis",
    )
    return 0


@dataclass(frozen=True)
class StatusArgs(ServerArgs):
    """Which machines and runs are on a server."""


def _status(words: list[str]) -> int:
    server = parse(StatusArgs, words, "redis status").find()
    from shoal.engines.redis.envelope import Refusals
    from shoal.engines.redis.records import LEASE, Registry, machine_key

    out = console()
    with _connected(server) as link:
        registry = Registry(link, server.key, Refusals())
        machines, runs = registry.machines(), registry.heads()
        ages = {machine.id: LEASE - int(link.pttl(machine_key(machine.id))) / 1000 for machine in machines}
    rows = [["host", "pid", "version", "workers", "at work", "tasks/s", "last heartbeat", "state"]]
    for machine in machines:
        busy = sum(bool(worker.run) for worker in machine.workers)
        state = "works" if busy else "waits"
        notes = [f"refused by {run}: {why}" for run, why in machine.refused_by.items()]
        notes += [f"refused {machine.refusals} messages"] if machine.refusals else []
        rows.append(
            [
                machine.host, str(machine.pid), machine.version, str(len(machine.workers)), str(busy),
                f"{machine.speed:.1f}", f"{max(ages[machine.id], 0):.1f} s ago", "; ".join([state, *notes]),
            ]
        )  # fmt: skip
    say(out, f"{server.url}: {len(machines)} machine(s), {len(runs)} run(s)")
    if machines:
        table(out, rows)
    if runs:
        states = {True: "learns", False: "waits for workers"}
        table(
            out,
            [["run", "host", "pid", "version", "epoch", "workers", "state"]]
            + [
                [run.id, run.host, str(run.pid), run.version, str(run.epoch), str(run.have), states[run.started]]
                for run in runs
            ],
        )
    return 0


@contextlib.contextmanager
def _connected(server: Address) -> Iterator[redis_py.Redis]:
    """A connection for a command, whose failure is said in words."""
    import redis as redis_py

    from shoal.engines.redis.address import cannot_reach

    link = server.open(5.0)
    try:
        yield link
    except (redis_py.RedisError, OSError) as error:
        raise UsageError(cannot_reach(server, error)) from None
    finally:
        link.close()


@dataclass(frozen=True)
class FlushArgs(ServerArgs):
    """Remove all that Shoal has put on a server. Heads and workers begin anew by themselves; nothing is lost."""


def _flush(words: list[str]) -> int:
    server = parse(FlushArgs, words, "redis flush").find()
    from shoal.engines.redis.local_server import flush

    out = console()
    with _connected(server) as link:
        say(out, f"{flush(link)} keys removed from {server.url}; workers go back to waiting")
    return 0


@dataclass(frozen=True)
class StopArgs:
    """Stop the server that `shoal redis start` started. Workers wait for it to come back, or for you to stop them."""


def _stop(words: list[str]) -> int:
    parse(StopArgs, words, "redis stop")
    from shoal.engines.redis.address import state_folder
    from shoal.engines.redis.local_server import LocalServer

    local = LocalServer(state_folder())
    url = local.address.url
    local.stop()
    say(console(), f"the server at {url} has stopped")
    return 0
