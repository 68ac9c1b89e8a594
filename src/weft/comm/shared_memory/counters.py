"""Progress counters in shared memory.

Every rank counts up its own counter and only reads those of others, so that no atomic operation is needed. A wait spins
for a moment where every rank has a core of its own, then sleeps in the kernel (futex) until the counter changes, or,
where there is no futex, yields and naps. It checks from time to time that the process it waits for still exists.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES = 128
"""Bytes per counter: two must not share a cache line, nor a pair of lines that is fetched together."""
LOOK_EVERY_S = 0.2
"""Seconds between two looks at a peer that is waited for."""

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_SPINS = 400
_YIELDS = 200
_NAP_S = 50e-6
_WRAP = 2**32


class Peer:
    """A process whose end must be noticed."""

    __slots__ = ("pid", "rank", "started")

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.started = _start_of(pid)

    @property
    def is_gone(self) -> bool:
        if self.started is not None:
            return _start_of(self.pid) != self.started  # ended, a zombie, or another process under its number
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def _start_of(pid: int) -> str | None:
    """The start of a living process in the kernel's ticks; None if it does not live or there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else fields[19].decode()


class Counter:
    """A 32-bit word in shared memory, which wraps: its owner counts it up, the others wait for it."""

    __slots__ = ("_address", "_fence", "_futex", "_num_spins", "_owner", "_timeout_s", "_word", "count")

    def __init__(self, line: memoryview, *, owner: Peer, timeout_s: float, spin: bool) -> None:
        """`line`: LINE_BYTES, zeroed."""
        self._word = line.cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(line))
        self._owner = owner
        self._timeout_s = timeout_s
        self._num_spins = _SPINS if spin else 1
        self._fence = threading.Lock()
        self._futex = _find_futex()
        self.count = 0
        """The count so far; kept by the owner only."""

    def post(self) -> int:
        """Count up and return the count: whoever sees it also sees all that this rank wrote before."""
        self.count = count = (self.count + 1) % _WRAP
        self.order_writes()
        self._word[0] = count
        if self._futex is not None:
            self._futex(self._address, _FUTEX_WAKE, _EVERYBODY, None)
        return count

    def reached(self, count: int) -> bool:
        return (self._word[0] - count) % _WRAP < _WRAP // 2

    def wait(self, count: int) -> None:
        """Block until the owner has counted to `count`; RuntimeError, as gloo's, if it is gone or too late."""
        word = self._word
        for _ in range(self._num_spins):
            if (word[0] - count) % _WRAP < _WRAP // 2:
                self.order_writes()
                return
        started = looked = time.monotonic()
        num_yields = 0
        while ((seen := word[0]) - count) % _WRAP >= _WRAP // 2:
            if self._futex is not None:
                self._futex(self._address, _FUTEX_WAIT, seen, LOOK_EVERY_S)
            elif num_yields < _YIELDS:
                num_yields += 1
                time.sleep(0)
            else:
                time.sleep(_NAP_S)
            now = time.monotonic()
            if now - looked >= LOOK_EVERY_S:
                looked = now
                self._look(count, now - started)
        self.order_writes()

    def order_writes(self) -> None:
        """A memory fence. Taking and giving back a lock twice is one everywhere; x86 would need none."""
        with self._fence:
            pass
        with self._fence:
            pass

    def _look(self, count: int, waited_s: float) -> None:
        owner = self._owner
        if owner.is_gone and not self.reached(count):
            raise RuntimeError(f"Connection closed by peer: rank {owner.rank} (process {owner.pid}) is gone")
        if waited_s > self._timeout_s:
            raise RuntimeError(
                f"Timed out waiting {self._timeout_s * 1e3:.0f}ms for rank {owner.rank} in shared memory"
            )


@dataclass(frozen=True, slots=True)
class Waiting:
    """An exchange that this rank has begun, and that ends when it waits for it."""

    wait: Callable[[], None]


Futex = Callable[[int, int, int, float | None], None]
"""Address, operation, value, timeout."""


@functools.cache
def _find_futex() -> Futex | None:
    """The kernel's wait and wake on a word, without a compiler: through the C library's syscall()."""
    number = _SYSCALL_NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
    if number is None or sys.maxsize <= 2**32:
        return None
    call = ctypes.CDLL(None, use_errno=False).syscall
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)

    def futex(address: int, operation: int, value: int, timeout_s: float | None) -> None:
        if timeout_s is None:
            call(number, address, operation, value, None)
            return
        timespec = (ctypes.c_long * 2)(int(timeout_s), int(timeout_s % 1 * 1e9))
        call(number, address, operation, value, ctypes.addressof(timespec))

    return futex
