"""Available memory, to check before a large allocation."""

from __future__ import annotations

import os
import re
from pathlib import Path


def available_memory() -> int | None:
    """Bytes this process can still allocate on the machine or within its container's limit; None if unknown."""
    found = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        cached = re.search(r"^inactive_file (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
        found.append(max(0, int(limit) - int(used) + int(cached[1] if cached else 0)))
    if not found and "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: total memory, for want of better
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def format_bytes(count: int) -> str:
    """Format a number of bytes with a unit: `9.6 MiB`, `1.5 GiB`."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # not Linux
        return ""
