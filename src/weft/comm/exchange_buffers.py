"""Buffers for tensors that a group exchanges: in shared memory if it has some, so that they need not be copied there.

Whoever keeps buffers from step to step makes an `BufferAllocator` once, collectively, and then allocates in it by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.group import Group
from weft.comm.shared_memory.arena import ALIGNMENT_BYTES, Arena, round_up
from weft.comm.shared_memory.connect import SharedMemoryError


class BufferAllocator:
    """An allocator of a rank's own buffers; of ordinary memory where none is shared, or when that is full."""

    def __init__(self, group: Group, device: torch.device, *, num_bytes: int) -> None:
        """Collective. Of `num_bytes`, what is never used takes no memory."""
        self._device = device
        self._arena = _make_arena(group, device, num_bytes, is_common=False)

    def empty(self, numel: int, dtype: torch.dtype, *, shared: bool = True) -> torch.Tensor:
        """A flat, uninitialised buffer."""
        found = self._arena.empty(numel, dtype) if shared and self._arena is not None else None
        return torch.empty(numel, dtype=dtype, device=self._device) if found is None else found

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.empty(numel, dtype).zero_()


def bytes_for(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> int:
    """Bytes that buffers of these sizes take together."""
    return sum(round_up(numel * dtype.itemsize) + ALIGNMENT_BYTES for numel, dtype in zip(numels, dtypes, strict=True))


def common_empty(group: Group, device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
    """One buffer for all ranks of a group together, if they share memory; collective."""
    if group.shared is None:
        return None
    arena = _make_arena(group, device, max(numel, 1) * dtype.itemsize, is_common=True)
    # Every rank allocates the same place: the first of the one row.
    return None if arena is None else arena.empty(numel, dtype)


def _make_arena(group: Group, device: torch.device, num_bytes: int, *, is_common: bool) -> Arena | None:
    wire = group.host_wire
    if wire is None or group.connection is None or device.type != "cpu":
        return None
    row_bytes = round_up(max(num_bytes, 1), 4096)
    try:
        segment, _ = group.connection.share(row_bytes if is_common else row_bytes * wire.size)
    except SharedMemoryError:  # on all ranks of the host alike: buffers then pass through slots
        return None
    return wire.barrier.add_arena(segment, is_common=is_common)
