"""The command `worker`, and the flags that it shares with `redis`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from shoal.base import signals, validation
from shoal.cli.parsing import console, parse
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.engines.redis.address import Address


@dataclass(frozen=True)
class ServerArgs:
    """Which server, and how to get in."""

    redis: str | None = None
    """Address of the server, redis://HOST:PORT; SHOAL_REDIS_URL or the one of `shoal redis start` unless told."""
    password_file: str = ""
    """File with the password, which only you can read; SHOAL_REDIS_PASSWORD_FILE unless told."""
    ca_file: str = ""
    """File of certificates to check the server by, with rediss://; SHOAL_REDIS_CA_FILE unless told."""
    key_file: str = ""
    """File with the key that messages are signed with, the same everywhere; SHOAL_KEY_FILE unless told."""
    timeout: float = 5.0
    """Seconds without an answer from the server after which the connection is made anew."""

    def find(self) -> Address:
        """The server."""
        from shoal.engines.redis.address import find_server

        files = {name: getattr(self, name) for name in ("password_file", "ca_file", "key_file")}
        return find_server(self.redis, files=files)


@dataclass(frozen=True)
class WorkerArgs(ServerArgs):
    """Work for whatever runs there are, from now until you stop it. Waits where there are none."""

    workers: int | None = None
    """How many processes; one per core unless told."""
    allow: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Module whose functions and environments workers may use, beside Shoal's own tasks; may be given several times.
    __main__ allows scripts of heads on this machine."""


def worker(words: list[str]) -> int:
    """Work."""
    wanted = parse(WorkerArgs, words, "worker")
    from shoal.base.host import available_cores
    from shoal.engines.redis.supervisor import Supervisor

    problems = validation.problems(wanted, at_least_one=("workers",), above_zero=("timeout",))
    if problems:
        raise UsageError(problems)
    console()
    machine = Supervisor(wanted.find(), wanted.workers or available_cores(), wanted.allow, wanted.timeout)
    with signals.listening():
        machine.serve()
