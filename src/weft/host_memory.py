"""The memory of this host, or of the container that this process is in.

The kernel's own figures, also `MemAvailable`, are those of the whole host. A container's limit, and what it uses, are
read from its control group, under the names of version 2 and of version 1. Limits of groups between the host and the
one that is seen under /sys/fs/cgroup are not known here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _ControlGroup:
    """The files of a control group, below the root of the file system."""

    limit: str
    used: str
    stat: str
    cache_key: str
    """The line of `stat` with the bytes of file cache that the kernel drops first."""


_CONTROL_GROUPS = (
    _ControlGroup(
        limit="sys/fs/cgroup/memory.max",
        used="sys/fs/cgroup/memory.current",
        stat="sys/fs/cgroup/memory.stat",
        cache_key="inactive_file",
    ),
    _ControlGroup(
        limit="sys/fs/cgroup/memory/memory.limit_in_bytes",
        used="sys/fs/cgroup/memory/memory.usage_in_bytes",
        stat="sys/fs/cgroup/memory/memory.stat",
        cache_key="total_inactive_file",
    ),
)


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory of this host or container."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit, _ in _limits(root))])


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that a process may still take: of the host's, as the kernel estimates it, and of the container's."""
    on_host = read_proc(str(root / "proc/meminfo"), "MemAvailable")  # like "123 kB"
    left = [limit - used for limit, used in _limits(root)]
    return max(0, min([1024 * int(on_host.split()[0]) if on_host else host_memory_bytes(root), *left]))


def read_proc(file: str, key: str) -> str:
    """The value of the first line "key: value" of a file of the kernel; empty if there is none."""
    lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of every control group that has one, and the bytes that it uses and cannot drop at once."""
    for group in _CONTROL_GROUPS:
        limit = _read_count(root / group.limit)  # None: there is no such file, or it says "max"
        if limit is None:
            continue
        stat = root / group.stat
        counts = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines()) if stat.exists() else {}
        used = (_read_count(root / group.used) or 0) - int(counts.get(group.cache_key, 0))
        yield limit, max(0, used)


def _read_count(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
