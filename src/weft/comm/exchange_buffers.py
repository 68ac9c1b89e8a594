"""Memory for tensors that a group exchanges: shared if it has some, so that they need not be copied there.

Memory for buffers that are kept from step to step is asked for once, collectively; each rank then allocates in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.group import Group
from weft.comm.shared_memory.arena import ALIGNMENT_BYTES, Arena, round_up
from weft.comm.shared_memory.connect import SharedMemoryError


class BufferAllocator:
    """Allocates a rank's own buffers in its group's shared memory; elsewhere if there is none, or when it is full."""

    def __init__(self, group: Group, device: torch.device, *, num_bytes: int) -> None:
        """Collective. The part of `num_bytes` that is never used takes no memory."""
        self._device = device
        self._arena = _make_arena(group, device, num_bytes, is_common=False)

    def empty(self, numel: int, dtype: torch.dtype, *, shared: bool = True) -> torch.Tensor:
        """A flat buffer that is not initialised; `shared`: it is exchanged."""
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
    if arena is None:
        return None
    # Every rank allocates the same place: the first of the one row.
    return arena.empty(numel, dtype)


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
