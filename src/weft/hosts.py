"""Which ranks share a host: those, and only those, may talk through its memory.

The same boot id means the same running kernel; the same network namespace means the same place on the network. Both
must agree, so that an emulated network, whose hosts are namespaces of one machine, is never bypassed. And the same
namespace of processes, because ranks look for each other by process number.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = (Path("/proc/self/ns/net"), Path("/proc/self/ns/pid"))


def host_id() -> str:
    """The name of this host; equal for two processes that share memory and a place on the network."""
    try:
        return "/".join([_BOOT_ID.read_text().strip(), *(str(os.stat(path).st_ino) for path in _NAMESPACES)])
    except OSError:  # not Linux: no namespaces there
        return f"{platform.node()}/{uuid.getnode():012x}"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def number_hosts(ids: Sequence[str]) -> tuple[int, ...]:
    """Of every rank, which host it is on: hosts are numbered in the order of their first rank."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(one, len(numbers)) for one in ids)
