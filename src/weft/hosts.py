"""The identity of a host: ranks with the same one, and only those, exchange through its memory.

It is made of the boot id (the running kernel), the network namespace, so that an emulated network whose hosts are
namespaces of one machine is never bypassed, and the process namespace, because ranks find each other by process id.
"""

from __future__ import annotations

import os
import platform
import uuid
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = (Path("/proc/self/ns/net"), Path("/proc/self/ns/pid"))


def host_id() -> str:
    """A name that is equal for two processes that share memory and a place on the network."""
    try:
        return "/".join([_BOOT_ID.read_text().strip(), *(str(os.stat(path).st_ino) for path in _NAMESPACES)])
    except OSError:  # not Linux: no namespaces there
        return f"{platform.node()}/{uuid.getnode():012x}"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
