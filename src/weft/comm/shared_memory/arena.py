"""Shared memory from which tensors are allocated, so that they can be exchanged without being copied first.

Every rank has a row of its own, in which it allocates by itself, and sees the rows of all others. A *common* arena has
a single row, shared by all ranks.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque

import torch

from weft.comm.shared_memory.segments import Segment

ALIGNMENT_BYTES = 128
_MOST_VIEWS = 4096


def round_up(num_bytes: int, multiple: int = ALIGNMENT_BYTES) -> int:
    return -(-num_bytes // multiple) * multiple


class Arena:
    """The rows of one segment, and this rank's free space in its own."""

    def __init__(self, segment: Segment, *, number: int, index: int, num_ranks: int, is_common: bool) -> None:
        """`number` names the arena alike on all ranks; `index` is this rank's row."""
        num_rows = 1 if is_common else num_ranks
        whole = segment.part(0, segment.num_bytes)
        self.number = number
        self.is_common = is_common
        self.row_bytes = segment.num_bytes // num_rows
        row = 0 if is_common else index
        self._memory = whole[row * self.row_bytes : (row + 1) * self.row_bytes]
        flat = torch.frombuffer(whole, dtype=torch.uint8)
        rows = flat.view(num_rows, self.row_bytes)
        self._rows = tuple(rows[0 if is_common else rank] for rank in range(num_ranks))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = {0: self.row_bytes}
        self._returned: deque[tuple[int, int]] = deque()
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Uninitialised memory in this rank's row, free again with its last reference; None if the row is full."""
        while self._returned:
            self._merge(*self._returned.popleft())
        num_bytes = round_up(max(numel, 1) * dtype.itemsize)
        start = next((start for start, free_bytes in self._free.items() if free_bytes >= num_bytes), None)
        if start is None:
            return None
        free_bytes = self._free.pop(start)
        if free_bytes > num_bytes:
            self._free[start + num_bytes] = free_bytes - num_bytes
        held = self._memory[start : start + num_bytes]
        # The finalizer refers to the arena, so that it lives, and the group finds it, as long as a tensor lies in it.
        # The last reference may go in any thread, or in the middle of another allocation: then it is only noted.
        weakref.finalize(held, self._free_later, start, num_bytes).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=max(numel, 1))[:numel]

    def _free_later(self, start: int, num_bytes: int) -> None:
        self._returned.append((start, num_bytes))

    def _merge(self, start: int, num_bytes: int) -> None:
        """Join freed memory with the free space around it."""
        merged: dict[int, int] = {}
        last = -1
        for first, size in sorted({**self._free, start: num_bytes}.items()):
            if last >= 0 and last + merged[last] == first:
                merged[last] += size
            else:
                merged[first], last = size, first
        self._free = merged

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """A tensor's offset in this rank's row, if it lies there."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.row_bytes else None

    def view(self, rank: int, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Part of a rank's row, flat."""
        key = (rank, offset, num_bytes, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = self._rows[rank][offset : offset + num_bytes].view(dtype)
        return found
