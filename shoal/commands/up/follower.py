"""Every rank but the first: at most one Ray node per machine, for as long as rank 0 wants it."""

from __future__ import annotations

import contextlib
import select
import signal
import time
from pathlib import Path
from typing import Any

from shoal.base.lifetime import Reaper
from shoal.commands.up import link
from shoal.commands.up.allocation import Allocation
from shoal.commands.up.node import Node
from shoal.errors import EngineError

_LOOK = 0.2  # seconds between looks at Ray


def follow(allocation: Allocation, folder: Path, deadline: float) -> int:
    """Do as rank 0 says, until it ends. Rank 0 gives the job its exit code; this is 0 if all went well."""
    # For rank 0, which gets them too and takes the driver's time. If it does not live, its connection ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    line = link.find(folder, allocation.rank, allocation.cores, allocation.limit, time.monotonic() + deadline)
    with contextlib.closing(Reaper()) as reaper, contextlib.closing(line.socket):
        logs = folder / "logs" / link.name(link.machine())
        node: Node | None = None
        state = ""
        while True:
            messages: list[dict[str, Any]] | None = line.waiting
            line.waiting = []
            if not messages and select.select([line.socket], [], [], _LOOK)[0]:
                messages = line.receive()
                if messages is None:
                    raise EngineError(f"rank {allocation.rank}: rank 0 is gone, so this rank ends too")
            for message in messages or []:
                if message.get("do") == "node":
                    node = _start(reaper, message, logs)
                elif message.get("do") == "end":
                    if node is not None:
                        node.keep_logs()
                    reaper.close()
                    line.send({"state": "stopped"})
                    return 0
            if node is None or state == "failed":
                continue
            now = "failed" if node.ended else "joined" if state == "joined" or node.up else ""
            if now != state:
                state = now
                line.send({"state": state, "said": node.ended})


def _start(reaper: Reaper, message: dict[str, Any], logs: Path) -> Node:
    return Node(
        reaper,
        ip=message["ip"],
        cores=message["cores"],
        limit=message["limit"],
        token=message["token"],
        address=message["address"],
        folder=message["folder"],
        log=logs / "ray-start.log",
    )
