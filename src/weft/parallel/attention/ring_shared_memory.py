"""Blocks of all ranks of a ring in memory that they share: each rank writes its own and reads the others' in place.

Ranks of one host neither send blocks to each other nor wait for one another at every step: they wait once, until all
have written. Two buffers are used in turn, so that a rank may write its next block while another still reads the last:
a rank that writes for the third time knows that all have reached the second, and are done with the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.collectives import Pending, all_gather
from weft.comm.exchange_buffers import common_empty
from weft.comm.group import Group
from weft.comm.shared_memory.arena import round_up


class SharedBlocks:
    """Shared memory for one block per rank of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffers: list[Tensor] = []
        self._row_bytes = 0
        self._turn = 0
        self._whole: Tensor | None = None
        """The rows of all ranks, from `allocate` to `gather`."""

    def allocate(self, numel: int, like: Tensor) -> Tensor | None:
        """Memory for this rank's next block; collective when blocks are larger than ever. None: nothing is shared."""
        num_bytes = numel * like.element_size()
        if self._group.shared is None or like.device.type != "cpu" or not num_bytes:
            return None
        if num_bytes > self._row_bytes:
            self._row_bytes = round_up(num_bytes)
            total = self._row_bytes * self._group.size
            made = [common_empty(self._group, like.device, total, torch.uint8) for _ in range(2)]
            self._buffers = [one for one in made if one is not None]
        if len(self._buffers) < 2:
            return None
        self._turn = 1 - self._turn
        rows = self._buffers[self._turn].view(self._group.size, -1)[:, :num_bytes]
        self._whole = rows.view(like.dtype)
        return self._whole[self._group.index]

    def gather(self, block: Tensor) -> tuple[Tensor, Pending] | None:
        """All ranks' blocks, one per row, and what to wait for before reading others'; None if `block` is elsewhere."""
        if self._whole is None or self._whole[self._group.index].data_ptr() != block.data_ptr():
            return None
        whole, self._whole = self._whole, None
        return whole, all_gather(whole, block, self._group, wait=False)
