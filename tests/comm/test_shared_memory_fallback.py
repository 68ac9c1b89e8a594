"""Where memory cannot be shared: all ranks find out together, say so once, and exchange through sockets instead."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanges import new_group, new_mesh, world
from meshes import data_group
from ranks import ranks

from weft import hosts
from weft.comm import collectives
from weft.comm.exchange_buffers import BufferAllocator
from weft.comm.group import Group
from weft.comm.shared_memory.connect import Connection
from weft.errors import LaunchError, PlanError
from weft.mesh import make_mesh
from weft.plan.plan import Comm, Plan
from weft.world import World, join_world

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="makes namespaces of its own, which takes root"
)
_NEW_NETWORK, _NEW_MOUNTS, _PRIVATE_AND_BELOW = 0x40000000, 0x00020000, (1 << 18) | (1 << 14)


class Notices(logging.Handler):
    """Log messages of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def listening() -> Iterator[Notices]:
    notices, log = Notices(), logging.getLogger("weft")
    log.addHandler(notices)
    try:
        yield notices
    finally:
        log.removeHandler(notices)


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


def check_works(group: Group) -> None:
    assert group.shared is None and group.levels is None and group.connection is None
    mine = torch.full((5,), float(group.index))
    collectives.all_reduce(mine, group)
    assert mine.tolist() == [sum(range(group.size))] * 5
    assert BufferAllocator(group, torch.device("cpu"), num_bytes=100).zeros(10, torch.float32).tolist() == [0.0] * 10


def check_one_notice(notices: Notices, *, about: str) -> None:
    """On one rank, once, however many groups are made."""
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, notices.texts)
    said = [text for texts in everyones for text in texts]
    assert len(said) == 1 and "cannot share memory" in said[0] and about in said[0] and "sockets" in said[0]


def fail_on(rank: int, what: str, patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == rank:
        patch.setattr(f"weft.comm.shared_memory.connect.{what}", refuse)


@ranks(3)
@pytest.mark.parametrize("rank, what", [(0, "SegmentOwner"), (1, "open_segment"), (2, "open_segment")])
def test_one_rank_that_cannot_is_enough(rank: int, what: str) -> None:
    with pytest.MonkeyPatch.context() as patch, listening() as notices:
        fail_on(rank, what, patch)
        for group in new_mesh("auto", ("data", "one"), ("data", "two"), ("world", "three")).groups:
            check_works(group)
    about = "No space left" if what == "SegmentOwner" else "cannot open"
    check_one_notice(notices, about=about)


@ranks(3)
@pytest.mark.parametrize("rank, what", [(0, "SegmentOwner"), (1, "open_segment")])
def test_a_plan_that_insists_is_refused_on_all_ranks(rank: int, what: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_on(rank, what, patch)
        with pytest.raises(LaunchError, match='cannot share memory .* transport = "c10d"'):
            new_mesh("shared", ("data", "insists"))


@ranks(2)
def test_too_little_memory_for_buffers_is_no_reason_to_stop() -> None:
    """The group shares memory, but there is none left for an arena: tensors then pass through slots."""
    group = new_group("shared", "no arena")
    with pytest.MonkeyPatch.context() as patch:
        fail_on(0, "SegmentOwner", patch)
        room = BufferAllocator(group, torch.device("cpu"), num_bytes=2**20)
    mine = room.zeros(50_000, torch.float32).add_(group.index + 1)
    collectives.all_reduce(mine, group)
    assert group.shared is not None and bool((mine == 3.0).all())


@ranks(2)
def test_room_for_nothing_is_room() -> None:
    group = new_group("shared", "nothing")
    room = BufferAllocator(group, torch.device("cpu"), num_bytes=0)
    assert room.empty(0, torch.float32).numel() == 0 and room.zeros(10_000, torch.float32).sum() == 0


def mount_small_memory(size: str) -> None:
    """This process alone sees another /dev/shm from now on."""
    library = ctypes.CDLL(None, use_errno=True)
    done = library.unshare(_NEW_MOUNTS)
    done = done or library.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_AND_BELOW), None)
    done = done or library.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), f"size={size}".encode())
    if done:
        pytest.skip(f"no mount namespace here: {os.strerror(ctypes.get_errno())}")


@needs_root
@ranks(2, fresh=True)
@pytest.mark.parametrize("size, about", [("64k", "No space left"), ("100m", "cannot open")])
def test_a_small_file_system_and_one_that_others_do_not_see(size: str, about: str) -> None:
    mount_small_memory(size)
    with pytest.MonkeyPatch.context() as patch, listening() as notices:
        patch.setattr("weft.comm.process_groups.Connection", functools.partial(Connection, ways=("named",)))
        check_works(new_mesh("auto", ("data", "small")).groups[0])
        check_one_notice(notices, about=about)
    assert os.listdir("/dev/shm") == []


@needs_root
@ranks(3, fresh=True)
def test_ranks_of_another_network_are_another_host() -> None:
    """Although they are processes of one machine: an emulated network must not be bypassed."""
    library, here = ctypes.CDLL(None), os.open("/proc/self/ns/net", os.O_RDONLY)
    if dist.get_rank() == 2 and library.unshare(_NEW_NETWORK):
        pytest.skip("no network namespace here")
    joined = join_world("cpu")
    library.setns(here, 0)  # there is no way to the others from there
    assert joined.hosts == (0, 0, 1)
    group = data_group("network", transport="auto", world=joined)
    assert group.shared is None and group.levels is not None


@ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_another_boot_share_nothing(rank: int, tmp_path: Path) -> None:
    other = tmp_path / "boot_id"
    with pytest.MonkeyPatch.context() as patch, listening() as notices:
        if dist.get_rank() == rank:
            other.write_text("4f9dd2a1-0000-4000-8000-000000000000\n")
            patch.setattr(hosts, "_BOOT_ID", other)
        joined = join_world("cpu")
    assert joined.hosts == (0, 1)
    check_works(data_group("boot", transport="auto", world=joined))
    assert not notices.texts, "there is nothing to notice: they are on two hosts"


@pytest.mark.parametrize("which", ["_BOOT_ID", "_NAMESPACES"])
def test_a_host_is_a_boot_and_its_namespaces(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = hosts.host_id()
    assert here == hosts.host_id()
    file = tmp_path / "other"
    file.write_text("other")
    known = getattr(hosts, which)
    for changed in [file] if which == "_BOOT_ID" else [(file, *known[1:]), (*known[:-1], file)]:
        monkeypatch.setattr(hosts, which, changed)
        assert hosts.host_id() != here


def test_a_system_without_such_files_has_a_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_BOOT_ID", Path("/nowhere"))
    assert hosts.host_id() == hosts.host_id()


def test_shared_memory_is_for_host_tensors() -> None:
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cuda", 0))
    with pytest.raises(PlanError, match="host memory"):
        make_mesh(Plan(comm=Comm(transport="shared")), alone)


@ranks(2)
@pytest.mark.parametrize("transport, shares", [("auto", True), ("shared", True), ("c10d", False)])
def test_the_plan_says_how_ranks_exchange(transport: str, shares: bool) -> None:
    assert world().hosts == (0, 0)
    assert (new_mesh(transport, ("data", "plan")).groups[0].shared is not None) == shares
