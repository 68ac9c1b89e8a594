"""Blocks of all ranks of a ring in memory that they share: each writes its own, and reads the others' where they lie.

Ranks of one host need not send blocks to each other, nor wait for one another at every step: they wait once, until all
have written. There are two such buffers, used in turn, so that a rank may write its next block while another still
reads the last: whoever writes for the third time knows that all have come to the second, and are done with the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.collectives import Pending, all_gather
from weft.comm.exchange_buffers import common_empty
from weft.comm.group import Group
from weft.comm.shared_memory.arena import round_up


class CommonBlocks:
    """Where the ranks of a group, all on one host, have their blocks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffers: list[Tensor] = []
        self._row_bytes = 0
        self._turn = 0
        self._whole: Tensor | None = None
        """Of the last block that was given a place: everybody's, a row each."""

    def place(self, numel: int, like: Tensor) -> Tensor | None:
        """Memory for this rank's next block; collective when blocks are larger than ever. None: there is none."""
        num_bytes = numel * like.element_size()
        if self._group.shared is None or like.device.type != "cpu" or not num_bytes:
            return None
        if num_bytes > self._row_bytes:
            self._row_bytes = round_up(num_bytes)
            self._buffers = [
                made
                for _ in range(2)
                if (made := common_empty(self._group, like.device, self._row_bytes * self._group.size, torch.uint8))
                is not None
            ]
        if len(self._buffers) < 2:
            return None
        self._turn = 1 - self._turn
        rows = self._buffers[self._turn].view(self._group.size, -1)[:, :num_bytes]
        self._whole = rows.view(like.dtype)
        return self._whole[self._group.index]

    def gather(self, block: Tensor) -> tuple[Tensor, Pending] | None:
        """Everybody's blocks, and what to wait for before others' are read; None if this block has no place here."""
        if self._whole is None or self._whole[self._group.index].data_ptr() != block.data_ptr():
            return None
        whole, self._whole = self._whole, None
        return whole, all_gather(whole, block, self._group, wait=False)
