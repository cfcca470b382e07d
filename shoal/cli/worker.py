"""The command `worker`, and the flags that it shares with `redis`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from shoal.base import signals, validation
from shoal.cli.console import console
from shoal.cli.parsing import parse
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.engines.redis.address import Address


@dataclass(frozen=True)
class ServerArgs:
    """Which Redis server to use, and how to log in."""

    redis: str | None = None
    """Address of the server, redis://HOST:PORT (default: SHOAL_REDIS_URL, or the server of `shoal redis start`)."""
    password_file: str = ""
    """File with the password, readable only by you (default: SHOAL_REDIS_PASSWORD_FILE)."""
    ca_file: str = ""
    """CA certificates to verify a rediss:// server with (default: SHOAL_REDIS_CA_FILE)."""
    key_file: str = ""
    """File with the key that signs messages, the same on all machines (default: SHOAL_KEY_FILE)."""
    timeout: float = 5.0
    """Seconds without an answer from the server after which to reconnect."""

    def find(self) -> Address:
        """Find the server that the flags name."""
        from shoal.engines.redis.address import find_server

        files = {"password_file": self.password_file, "ca_file": self.ca_file, "key_file": self.key_file}
        return find_server(self.redis, files=files)


@dataclass(frozen=True)
class WorkerArgs(ServerArgs):
    """Offer workers to all runs on a Redis server until you stop the command. Waits while there is no run."""

    workers: int | None = None
    """Number of worker processes (default: one per core)."""
    allow: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Module whose functions and environments workers may use, in addition to Shoal's own; may be given several times.
    __main__ allows scripts of heads on this machine."""


def worker(words: list[str]) -> int:
    """Run the workers of this machine until a signal."""
    args = parse(WorkerArgs, words, "worker")
    from shoal.base.host import available_cores
    from shoal.engines.redis.supervisor import Supervisor

    problems = validation.field_problems(args, at_least_one=("workers",), above_zero=("timeout",))
    if problems:
        raise UsageError(problems)
    console()
    supervisor = Supervisor(args.find(), args.workers or available_cores(), args.allow, args.timeout)
    with signals.listening():
        supervisor.serve()
