"""Slow hosts: a process that limits each host's processes to a share of the processor.

Every few milliseconds it reads the processor time of a host's processes. A host ahead of its share is stopped (SIGSTOP)
until the share has caught up, so waiting is free and computing is slowed, as on a slow machine. A control group would
do the same, but leave a folder behind when the lab is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_TICK_S = 0.002
_SCAN_S = 0.05
"""Interval of the scan for new processes; one that lives shorter is not slowed."""
_MAX_CREDIT_S = 0.02
"""Wall time of unused share that a host may keep: little, so that waiting does not buy a long sprint."""
_NICENESS = -19


class _Throttled:
    """The processes of one host."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit_s = 0.0
        self._taken_s: dict[int, float] = {}
        self._stopped = False

    def update_members(self, pids: set[int]) -> None:
        for pid in self._taken_s.keys() - pids:
            del self._taken_s[pid]
        for pid in pids - self._taken_s.keys():
            self._taken_s[pid] = _processor_s(pid)
            _prefer(pid)
            if self._stopped:
                _signal(pid, signal.SIGSTOP)

    def tick(self, elapsed_s: float) -> None:
        self._credit_s += elapsed_s * self._share
        for pid, before_s in self._taken_s.items():
            self._taken_s[pid] = max(before_s, _processor_s(pid))
            self._credit_s -= self._taken_s[pid] - before_s
        self._credit_s = min(self._credit_s, _MAX_CREDIT_S * self._share)
        if self._stopped != (self._credit_s < 0):
            self._stopped = not self._stopped
            for pid in self._taken_s:
                _signal(pid, signal.SIGSTOP if self._stopped else signal.SIGCONT)


def run_throttle(shares: Mapping[int, float]) -> None:
    """Limit hosts to `shares` of a core, by inode of the network namespace, until this process is killed."""
    hosts = {inode: _Throttled(share) for inode, share in shares.items()}
    last_s = scanned_s = float("-inf")
    while True:
        now_s = time.monotonic()
        if now_s - scanned_s >= _SCAN_S:
            members = _members(hosts.keys())
            for inode, host in hosts.items():
                host.update_members(members[inode])
            scanned_s = now_s
        for host in hosts.values():
            host.tick(min(now_s - last_s, 1.0))
        last_s = now_s
        time.sleep(_TICK_S)


def _members(inodes: Iterable[int]) -> dict[int, set[int]]:
    """The processes in each network namespace: only ranks, because the lab's own processes are in none of them."""
    found: dict[int, set[int]] = {inode: set() for inode in inodes}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                inode = Path("/proc", name, "ns", "net").stat().st_ino
            except OSError:  # it has ended
                continue
            if inode in found:
                found[inode].add(int(name))
    return found


def _processor_s(pid: int) -> float:
    """Processor time of all threads of a process; 0 if it has ended."""
    try:
        # the id of its CPU-time clock (clock_getcpuclockid, which Python lacks)
        return time.clock_gettime(ctypes.c_int32((~pid << 3) | 2).value)
    except OSError:
        return 0.0


def _prefer(pid: int) -> None:
    """Give a process precedence over other work on this machine, so that it gets its whole share."""
    with suppress(OSError):  # it has ended, or the kernel has no such file
        os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICENESS))  # where the kernel weighs sessions, not processes


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
