"""Memory between processes: what one writes another reads, nobody else opens it, and nothing of it stays behind."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from weft.comm.shared_memory import segments
from weft.comm.shared_memory.segments import SegmentHandle, SegmentOwner, Way, open_segment

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and /dev/shm")
both_ways = pytest.mark.parametrize("way", ["anonymous", "named"] if hasattr(os, "memfd_create") else ["named"])
NAMES = Path("/dev/shm")


def names() -> set[str]:
    return {path.name for path in NAMES.glob("weft-*")}


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def in_child(body: Callable[[], None]) -> int:
    """The exit code of a forked process that runs the body."""
    child = os.fork()
    if not child:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@both_ways
def test_what_one_process_writes_another_reads(way: Way) -> None:
    owner = SegmentOwner(10_000, way)
    assert bytes(owner.segment.part(0, 10_000)) == bytes(10_000)
    handle = owner.handle

    def write() -> None:
        open_segment(handle).part(9_996, 4)[:] = b"weft"

    assert in_child(write) == 0
    assert bytes(owner.segment.part(9_996, 4)) == b"weft"


@both_ways
def test_parts_outlive_the_segment_and_its_maker(way: Way) -> None:
    owner = SegmentOwner(100, way)
    part = open_segment(owner.handle).part(50, 50)
    owner.segment.part(50, 4)[:] = b"weft"
    del owner
    gc.collect()
    assert bytes(part[:4]) == b"weft"


@both_ways
def test_nobody_opens_it_by_its_ticket_after_it_is_closed(way: Way) -> None:
    owner = SegmentOwner(100, way)
    opened = open_segment(owner.handle)
    owner.close()
    with pytest.raises(OSError):
        open_segment(owner.handle)
    owner.close()  # again, which is nothing
    opened.part(0, 4)[:] = b"weft"
    assert bytes(owner.segment.part(0, 4)) == b"weft"


@both_ways
def test_a_ticket_opens_only_what_it_was_made_for(way: Way) -> None:
    owner, other = SegmentOwner(100, way), SegmentOwner(100, way)
    with pytest.raises(OSError, match="something else"):
        open_segment(replace(owner.handle, token=other.handle.token))
    with pytest.raises(OSError, match="something else"):
        open_segment(replace(owner.handle, num_bytes=10**6))


@needs_linux
def test_another_file_under_the_same_number_is_left_alone(tmp_path: Path) -> None:
    """A process of another container may have our number, and anything under its descriptors."""
    path = tmp_path / "precious"
    path.write_bytes(bytes(range(256)) * 100)
    owner = SegmentOwner(100, "anonymous")
    with path.open("rb+") as file, pytest.raises(OSError):
        open_segment(replace(owner.handle, fd=file.fileno()))
    read, write = os.pipe()
    with pytest.raises(OSError):
        open_segment(replace(owner.handle, fd=read))
    os.close(read), os.close(write)
    with pytest.raises(OSError):
        open_segment(replace(owner.handle, fd=10_000))
    assert path.read_bytes() == bytes(range(256)) * 100


@needs_linux
@both_ways
def test_it_is_private_to_the_user(way: Way) -> None:
    umask = os.umask(0)
    try:
        owner = SegmentOwner(100, way)
    finally:
        os.umask(umask)
    status = os.stat(f"/proc/self/fd/{owner.handle.fd}")
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_uid == os.geteuid()


@needs_linux
def test_a_name_lives_only_until_it_is_closed() -> None:
    before = names()
    owner = SegmentOwner(100, "named")
    assert len(names() - before) == 1
    owner.close()
    assert names() == before
    owner = SegmentOwner(100, "named")
    del owner
    gc.collect()
    assert names() == before


@needs_linux
def test_a_child_leaves_its_parents_name_alone() -> None:
    """Workers of a DataLoader are forked, and drop copies of all their parent had."""
    held = [SegmentOwner(100, "named")]
    handle = held[0].handle
    assert in_child(held.clear) == 0
    assert open_segment(handle).num_bytes == handle.num_bytes


@needs_linux
@both_ways
def test_an_opened_segment_needs_no_descriptor(way: Way) -> None:
    """A model of a thousand buffers must not meet the limit of open files."""
    before = num_descriptors()
    owners = [SegmentOwner(100, way) for _ in range(20)]
    opened = [open_segment(owner.handle) for owner in owners]
    for owner in owners:
        owner.close()
    assert num_descriptors() == before
    assert len(opened) == 20


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Exceptions raised in finalizers."""
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: found.append(about.exc_value))
    return found


def test_without_such_memory_there_is_one_plain_error(
    monkeypatch: pytest.MonkeyPatch, unraisable: list[object]
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(OSError, match="without a name"):
        SegmentOwner(100, "anonymous")
    gc.collect()
    assert not unraisable


@needs_linux
def test_a_maker_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, unraisable: list[object]) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left")

    before, descriptors = names(), num_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="no space"):
        SegmentOwner(100, "named")
    gc.collect()
    assert names() == before and num_descriptors() == descriptors and not unraisable


@needs_linux
def test_a_name_that_is_taken_is_not_removed(monkeypatch: pytest.MonkeyPatch, unraisable: list[object]) -> None:
    first = SegmentOwner(100, "named")
    monkeypatch.setattr(segments.secrets, "randbits", lambda _: first.handle.name_number - 1)
    with pytest.raises(FileExistsError):
        SegmentOwner(100, "named")
    gc.collect()
    assert open_segment(first.handle).num_bytes == 100 and not unraisable


SMALL_ROOM = """
import os
from weft.comm.shared_memory.segments import SegmentOwner
SegmentOwner(2**19, "named")
try:
    SegmentOwner(2**21, "named")
except OSError as error:
    print(error.errno, os.listdir("/dev/shm"))
SegmentOwner(2**21, "anonymous").segment.part(2**21 - 1, 1)[:] = b"x"
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small /dev/shm of its own")
def test_too_little_named_memory_is_found_at_once() -> None:
    """Not by a bus error at the first use. Memory without a name has no such limit."""
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, SMALL_ROOM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "28 []"  # ENOSPC, and what did not fit is gone


def test_a_ticket_is_plain_numbers() -> None:
    handle = SegmentOwner(100, "named").handle
    assert handle == SegmentHandle(**{field: getattr(handle, field) for field in SegmentHandle.__slots__})
    assert all(isinstance(getattr(handle, field), int | str) for field in SegmentHandle.__slots__)
