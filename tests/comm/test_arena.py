"""Tensors in a piece of shared memory: apart from each other, given back when nobody uses them, wherever that is."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from weft.comm.shared_memory import arena as arena_module
from weft.comm.shared_memory.arena import ALIGNMENT_BYTES, Arena
from weft.comm.shared_memory.segments import SegmentOwner, open_segment

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128)


def make_arenas(num_ranks: int = 1, row_bytes: int = 2**20, *, is_common: bool = False) -> list[Arena]:
    """The same arena as each rank sees it, all in this process, each through a mapping of its own."""
    owner = SegmentOwner(row_bytes if is_common else row_bytes * num_ranks, "named")
    segments = [open_segment(owner.handle) for _ in range(num_ranks)]
    return [
        Arena(segment, number=1, index=index, num_ranks=num_ranks, is_common=is_common)
        for index, segment in enumerate(segments)
    ]


def free_bytes(arena: Arena) -> int:
    """The largest tensor there is room for."""
    for num_bytes in range(arena.row_bytes, 0, -ALIGNMENT_BYTES):
        if arena.empty(num_bytes, torch.uint8) is not None:
            return num_bytes
    return 0


@pytest.fixture
def _many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_tensors_are_aligned_and_apart() -> None:
    (arena,) = make_arenas()
    held = [arena.empty(numel, dtype) for dtype in DTYPES for numel in (1, 3, 31, 32, 33)]
    spans = []
    for number, tensor in enumerate(held):
        assert tensor is not None and tensor.data_ptr() % ALIGNMENT_BYTES == 0
        tensor.view(torch.uint8).fill_(number)
        spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        assert arena.offset_of(tensor) == tensor.data_ptr() - spans[0][0]
    assert all(stop <= start for (_, stop), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False))
    for number, tensor in enumerate(held):
        assert tensor is not None and set(tensor.view(torch.uint8).tolist()) == {number}


def test_every_rank_sees_every_row() -> None:
    arenas = make_arenas(3, 4096)
    for index, arena in enumerate(arenas):
        tensor = arena.empty(100, torch.float32)
        assert tensor is not None
        tensor.fill_(index)
        part = tensor[7:50]
        offset = arena.offset_of(part)
        assert offset == 28
        for other in arenas:
            assert torch.equal(other.view(index, offset, part.nbytes, torch.float32), part)
            assert other is arena or other.offset_of(tensor) is None


def test_a_common_row_is_everybodys() -> None:
    arenas = make_arenas(2, 4096, is_common=True)
    held = [arena.empty(10, torch.float64) for arena in arenas]
    assert held[0] is not None and held[1] is not None
    held[0].fill_(2.5)
    assert held[1].tolist() == [2.5] * 10


def test_a_full_arena_has_no_room_until_something_is_given_back() -> None:
    (arena,) = make_arenas(row_bytes=4096)
    held = [arena.empty(256, torch.float32) for _ in range(4)]
    assert all(tensor is not None for tensor in held)
    assert arena.empty(1, torch.uint8) is None
    views = held[1][5:9], held[2].view(16, 16)  # type: ignore[index, union-attr]
    held[1] = held[2] = None
    assert arena.empty(1, torch.uint8) is None, "a view still lies in it"
    del views
    assert free_bytes(arena) == 2048, "two neighbours are one piece again"
    held.clear()
    assert free_bytes(arena) == 4096


def test_a_tensor_without_elements_has_its_place() -> None:
    (arena,) = make_arenas(row_bytes=4096)
    nothing = arena.empty(0, torch.float32)
    assert nothing is not None and nothing.numel() == 0


def test_an_arena_lasts_as_long_as_anything_lies_in_it() -> None:
    (arena,) = make_arenas(row_bytes=4096)
    tensor = arena.empty(8, torch.float32)
    assert tensor is not None
    del arena
    gc.collect()
    tensor.fill_(1.0)
    assert tensor.sum() == 8


def test_copies_are_ordinary_tensors() -> None:
    (arena,) = make_arenas(row_bytes=2**20)
    tensor = arena.empty(8, torch.float32)
    assert tensor is not None
    tensor.copy_(torch.arange(8.0))
    file = io.BytesIO()
    torch.save(tensor[2:4], file)
    assert len(file.getvalue()) < 4096, "the whole arena was saved"
    file.seek(0)
    assert torch.load(file).tolist() == [2.0, 3.0]
    leaf = torch.zeros(8, requires_grad=True)
    leaf.grad = tensor
    for made in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), copy.deepcopy(leaf).grad):
        assert torch.equal(made, tensor) and arena.offset_of(made) is None
        made.zero_()
    assert tensor.tolist() == list(range(8))


@pytest.mark.usefixtures("_many_switches")
def test_another_thread_may_drop_the_last_reference() -> None:
    """The thread that exchanges in the background does, while this one allocates."""
    (arena,) = make_arenas(row_bytes=2**16)
    dropped: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()

    def drop() -> None:
        while dropped.get() is not None:
            pass

    thread = threading.Thread(target=drop)
    thread.start()
    held: list[torch.Tensor] = []
    choose = random.Random(0)
    try:
        for number in range(5000):
            tensor = arena.empty(choose.choice((10, 100, 1000)), torch.int32)
            if tensor is not None:
                held.append(tensor.fill_(number))
            if len(held) > 6:
                one = held.pop(choose.randrange(len(held)))
                assert bool((one == one[0]).all()), "it lay in memory that was handed out again"
                dropped.put(one)
                del one
            del tensor
    finally:
        dropped.put(None)
        thread.join()
    held.clear()
    assert free_bytes(arena) == 2**16


@contextmanager
def striking(at_line: int, action: Callable[[], None]) -> Iterator[None]:
    """Run the action once, before the n-th line of whatever the arena's code does inside: as garbage collection may."""
    lines = 0

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != arena_module.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == at_line:
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_garbage_may_be_collected_in_the_middle_of_an_allocation(dropped: int) -> None:
    for line in range(1, 40):
        (arena,) = make_arenas(row_bytes=4096)
        held: list[torch.Tensor | None] = [arena.empty(200, torch.int32) for _ in range(3)]

        def drop(held: list[torch.Tensor | None] = held) -> None:
            held[dropped] = None

        with striking(line, drop):
            new = arena.empty(200, torch.int32)
        assert new is not None
        new.fill_(-1)
        for number, tensor in enumerate(held):
            if tensor is not None:
                tensor.fill_(number)
                assert bool((new == -1).all()), f"handed out twice, when garbage goes at line {line}"
        del new, tensor
        held.clear()
        assert free_bytes(arena) == 4096, f"lost, when garbage goes at line {line}"
