"""Slow hosts: a process that lets each host's processes use no more than their share of the processor.

It looks every few milliseconds how much processor time a host's processes took. A host that is ahead of its share is
stopped (SIGSTOP) until the share has caught up, so waiting costs nothing and computing is slowed, as on a slow machine.
The kernel's own way, a control group, would leave a folder behind when the lab is killed; this leaves nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

_TICK_S = 0.002
_SCAN_S = 0.05
"""How often new processes are looked for; one that lives shorter is not slowed."""
_MAX_CREDIT_S = 0.02
"""Wall time of unused share that a host may keep: a little, so that waiting does not buy a long sprint."""


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
    """Hold hosts to their shares of a core until this process is killed; hosts are named by their namespace's inode."""
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
    """The processes in each network namespace: ranks, for the lab's own processes are in none of them."""
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
        return time.clock_gettime(_clock_of(pid))
    except OSError:
        return 0.0


def _clock_of(pid: int) -> int:
    """The kernel's number for a process's clock (clock_getcpuclockid, which Python lacks)."""
    return ctypes.c_int32((~pid << 3) | 2).value


def _prefer(pid: int) -> None:
    """Let a process run before other work on this machine: its share is all it gets, but that it should get."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICENESS))  # where the kernel weighs sessions, not processes
    except OSError:  # it has ended, or the kernel does not do that
        pass


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
