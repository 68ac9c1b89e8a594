"""Memory that several processes of one host see: made by one of them, opened by the others, private to the user.

Linux has memory with no name (memfd), which peers open through the owner's /proc entry: it cannot outlive the processes
that use it, and no size limit of /dev/shm applies. Elsewhere, and where /proc is closed, it has a POSIX name, of mode
600, which the owner removes as soon as its peers have opened it.
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

_HEADER_BYTES = 4096
"""Before the memory itself: a token that proves to a peer that it opened the right thing."""
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHandle:
    """What a peer needs to open a segment: plain numbers."""

    way: Way
    num_bytes: int
    token: int
    """Written at its beginning."""
    pid: int = 0
    """anonymous: whose it is."""
    fd: int = -1
    """anonymous: its number there."""
    name_number: int = 0
    """named: after which its name is made."""


class Segment:
    """Zeroed memory in this process. It goes when nothing refers to it any more."""

    __slots__ = ("memory", "num_bytes")

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.memory = _map(fd, _HEADER_BYTES + num_bytes)

    def part(self, start: int, num_bytes: int) -> memoryview:
        first = _HEADER_BYTES + start
        return self.memory[first : first + num_bytes]

    @property
    def token(self) -> int:
        return int.from_bytes(self.memory[:_WORD_BYTES], "little")


class SegmentOwner:
    """A segment being handed out: peers can open it by its handle until `close`."""

    def __init__(self, num_bytes: int, way: Way) -> None:
        """OSError where there is too little memory of this kind, or none of it."""
        self._fd, self._name_number = -1, 0
        name_number = _random() if way == "named" else 0
        self._fd = _create(name_number)
        self._name_number, self._pid = name_number, os.getpid()
        try:
            _reserve(self._fd, _HEADER_BYTES + num_bytes, is_limited=way == "named")
            self.segment = Segment(self._fd, num_bytes)
        except BaseException:
            self.close()
            raise
        token = _random()
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


def open_segment(handle: SegmentHandle) -> Segment:
    """A segment that a process of this host made; OSError where it cannot be reached, or is not what it should be."""
    if handle.way == "anonymous":
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
    else:
        fd = _open_named(handle.name_number, os.O_RDWR)
    try:
        if os.fstat(fd).st_size < _HEADER_BYTES + handle.num_bytes:  # a process of another namespace has this number
            raise OSError(f"{handle} is something else")
        segment = Segment(fd, handle.num_bytes)
    finally:
        os.close(fd)
    if segment.token != handle.token:
        raise OSError(f"{handle} is something else")
    return segment


def forget_name(handle: SegmentHandle) -> None:
    """By the only peer, once it has opened a segment: nothing is left behind whatever becomes of its owner."""
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


def _map(fd: int, num_bytes: int) -> memoryview:
    """The file's memory, until nothing refers to it. Python's own mmap keeps a descriptor for each of them."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _library().mmap(None, num_bytes, access, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mapping = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(mapping, _library().munmap, address, num_bytes).atexit = False
    return memoryview(mapping).cast("B")


def _random() -> int:
    return secrets.randbits(62) + 1  # fits a signed word, and is never zero


def _name(number: int) -> str:
    return f"/weft-{number:016x}"


def _create(name_number: int) -> int:
    if name_number:
        return _open_named(name_number, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name")
    fd = os.memfd_create("weft")
    os.fchmod(fd, 0o600)  # left alone, every user could open it through /proc
    return fd


def _open_named(name_number: int, flags: int) -> int:
    import _posixshmem  # type: ignore[import-not-found]  # what multiprocessing.shared_memory stands on

    fd: int = _posixshmem.shm_open(_name(name_number), flags, mode=0o600)
    return fd


def _unlink(name_number: int) -> None:
    import _posixshmem

    with suppress(FileNotFoundError):  # the one peer that was to open it has removed it
        _posixshmem.shm_unlink(_name(name_number))


def _reserve(fd: int, num_bytes: int, *, is_limited: bool) -> None:
    """Give it its size. Where its file system is small, find out now and not by a bus error in the middle of a step."""
    os.ftruncate(fd, num_bytes)
    if is_limited and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
