"""How much memory a process may still take: asked before something large is allocated."""

from __future__ import annotations

import os
import re
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that this process can still take: the machine's, or those that its container has left. None if unknown."""
    found = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        cached = re.search(r"^inactive_file (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
        found.append(max(0, int(limit) - int(used) + int(cached[1] if cached else 0)))
    if not found and "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: all there is
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def format_bytes(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # not this kind of system
        return ""
