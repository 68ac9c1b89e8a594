"""Shared memory segments: created by one process, opened by others of the same host and user.

On Linux they are anonymous (memfd), and peers open them through the owner's /proc entry: they cannot outlive the
processes that use them, and no size limit of /dev/shm applies. Elsewhere, and where /proc is closed, they have a POSIX
name, of mode 600, which the owner removes as soon as its peers have opened them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

Way = Literal["anonymous", "named"]
Access = Literal["writes", "reads"]
"""What peers may do with a sealed segment."""

_HEADER_BYTES = 4096
"""Bytes before the memory itself, with a token that proves to a peer that it opened the right thing."""
_WORD_BYTES = 8
_NAME = "/weft-{:016x}"
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
"""Of Linux's fcntl.h; Python does not know the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHandle:
    """Plain numbers by which a peer opens a segment."""

    way: Way
    num_bytes: int
    token: int
    """Written at its beginning."""
    pid: int = 0
    """anonymous: its owner."""
    fd: int = -1
    """anonymous: the owner's file descriptor."""
    name_number: int = 0
    """named: the number in its name."""


class Segment:
    """Zeroed shared memory, mapped until nothing refers to it any more."""

    __slots__ = ("memory", "num_bytes")

    def __init__(self, fd: int, num_bytes: int, *, is_written: bool = True) -> None:
        self.num_bytes = num_bytes
        self.memory = _map(fd, _HEADER_BYTES + num_bytes, is_written=is_written)

    def part(self, start: int, num_bytes: int) -> memoryview:
        first = _HEADER_BYTES + start
        return self.memory[first : first + num_bytes]


class SegmentOwner:
    """A new segment, which peers can open by its handle until `close`."""

    def __init__(self, num_bytes: int, way: Way, *, sealed: Access | None = None) -> None:
        """OSError where there is too little memory of this kind, or none of it. `sealed`: peers are not trusted: they
        cannot change its size, by which its owner would die, and with "reads" cannot write; an anonymous one."""
        self._fd, self._name_number, self._pid = -1, 0, os.getpid()
        name_number = secrets.randbits(62) + 1 if way == "named" else 0  # a signed word, never zero
        self._fd = _create(name_number)
        self._name_number = name_number
        try:
            os.ftruncate(self._fd, _HEADER_BYTES + num_bytes)
            if way == "named" and hasattr(os, "posix_fallocate"):
                # /dev/shm may be small: find out now, and not by a bus error in the middle of a step.
                os.posix_fallocate(self._fd, 0, _HEADER_BYTES + num_bytes)
            self.segment = Segment(self._fd, num_bytes)
            if sealed is not None:
                _seal(self._fd, sealed)
        except BaseException:
            self.close()
            raise
        token = secrets.randbits(62) + 1
        self.segment.memory[:_WORD_BYTES] = token.to_bytes(_WORD_BYTES, "little")
        self.handle = SegmentHandle(
            way=way, num_bytes=num_bytes, token=token, pid=self._pid, fd=self._fd, name_number=self._name_number
        )

    def close(self) -> None:
        """Nobody else can open it from now on; those who have it keep it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._name_number:
            if os.getpid() == self._pid:  # not in a child that was forked meanwhile
                _unlink(self._name_number)
            self._name_number = 0

    __del__ = close


def open_segment(handle: SegmentHandle, *, sealed: Access | None = None) -> Segment:
    """A segment of another process of this host; OSError if it cannot be reached, or is not what it should be.
    `sealed`: what this process does with it, whose size must be fixed."""
    if handle.way == "anonymous":
        flags = os.O_RDONLY if sealed == "reads" else os.O_RDWR
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", flags | os.O_CLOEXEC)
    else:
        fd = _open_named(handle.name_number, os.O_RDWR)
    try:
        if sealed is not None and not _is_sealed(fd):
            raise OSError(f"{handle} may change its size")
        if os.fstat(fd).st_size < _HEADER_BYTES + handle.num_bytes:  # a process of another namespace has this number
            raise OSError(f"{handle} is something else")
        segment = Segment(fd, handle.num_bytes, is_written=sealed != "reads")
    finally:
        os.close(fd)
    if int.from_bytes(segment.memory[:_WORD_BYTES], "little") != handle.token:
        raise OSError(f"{handle} is something else")
    return segment


def forget_name(handle: SegmentHandle) -> None:
    """Remove a segment's name, as its only peer does once it has opened it: its owner may be killed before it can."""
    if handle.name_number:
        _unlink(handle.name_number)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
    )  # fmt: skip
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def _map(fd: int, num_bytes: int, *, is_written: bool) -> memoryview:
    """Map a file until nothing refers to the memory. Python's own mmap keeps a descriptor for each mapping."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_written else 0)
    address = _library().mmap(None, num_bytes, access, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mapping = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(mapping, _library().munmap, address, num_bytes).atexit = False
    return memoryview(mapping).cast("B")


def _create(name_number: int) -> int:
    if name_number:
        return _open_named(name_number, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name")
    fd = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)  # left alone, every user could open it through /proc
    return fd


def _seal(fd: int, access: Access) -> None:
    """Fix the size of anonymous memory, and with "reads" allow no further mapping that writes, where the kernel knows
    that (Linux 5.1). OSError where there are no seals."""
    import fcntl

    if access == "reads":
        with suppress(OSError):
            fcntl.fcntl(fd, _ADD_SEALS, _SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)


def _is_sealed(fd: int) -> bool:
    import fcntl

    needed = _SEAL_SHRINK | _SEAL_GROW
    return fcntl.fcntl(fd, _GET_SEALS) & needed == needed


def _open_named(name_number: int, flags: int) -> int:
    import _posixshmem  # type: ignore[import-not-found]  # which multiprocessing.shared_memory uses

    fd: int = _posixshmem.shm_open(_NAME.format(name_number), flags, mode=0o600)
    return fd


def _unlink(name_number: int) -> None:
    import _posixshmem

    with suppress(FileNotFoundError):  # the one peer that was to open it has removed it
        _posixshmem.shm_unlink(_NAME.format(name_number))
