"""The machine that was measured, and the versions of the software."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from shoal import __version__
from shoal.base.host import available_cores


def cpu() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return " ".join(found[1].split()) if found else platform.processor() or platform.machine()


def memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def facts(peers: Mapping[str, str]) -> str:
    """Describe date, machine and versions in a sentence or two."""
    day = datetime.datetime.now(tz=datetime.UTC).date()
    ours = {name: metadata.version(name) for name in ("gymnasium", "numpy", "jax")}
    mine = ", ".join(f"{name} {version}" for name, version in ours.items())
    text = (
        f"{day}; {cpu()}, {available_cores()} cores, {memory() / 2**30:.0f} GiB; {platform.system()}, "
        f"Python {platform.python_version()}. Shoal {__version__} with {mine}."
    )
    if peers:
        text += f" Peers: {', '.join(f'{name} {version}' for name, version in peers.items())}."
    return text
