"""The gradients of one flat buffer of parameters: where they add up, what travels, and what the optimizer is given.

whole    this rank's own gradients of all members, in the dtype they add up in (or, where they leave after every
         microbatch, travel in); kept, or borrowed from a pool for as long as they are needed
part     this rank's part of the sum over ranks; a view of `whole` where that is kept anyway
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.comm.collectives import Pending, all_reduce, reduce_scatter, uses_messages
from weft.comm.exchange_buffers import BufferAllocator, bytes_for
from weft.comm.group import Group
from weft.comm.shared_memory.native import copy
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.partition.flat_buffers import Sharding
from weft.plan.partition.zero import BufferPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One buffer's reduction under way."""

    gradients: Gradients
    pending: Pending
    borrowed: tuple[torch.Tensor, ...]
    is_last: bool
    """The part is complete after it: nothing more is added to it in this step."""


class GradientPool:
    """A pool of buffers, some of which lie where the group can see them."""

    def __init__(self, allocator: BufferAllocator) -> None:
        self._allocator = allocator
        self._pool: BufferPool[torch.Tensor] = BufferPool(torch.Tensor.numel)

    def borrow(self, numel: int, dtype: torch.dtype, *, travels: bool) -> torch.Tensor:
        """A buffer that is not initialised; one that `travels` is visible to the group, if possible."""
        found = self._pool.borrow(numel, dtype)
        return self._allocator.empty(numel, dtype, shared=travels) if found is None else found[:numel]

    def hand_back(self, borrowed: Sequence[torch.Tensor]) -> None:
        for buffer in borrowed:
            self._pool.hand_back(buffer if buffer._base is None else buffer._base, buffer.dtype)


def gradient_memory_bytes(flats: Sequence[FlatParameters]) -> int:
    """Bytes of all gradients that may travel at once."""
    return bytes_for([flat.flat.numel for flat in flats], [torch_dtype(flat.buffer.reduce) for flat in flats])


class Gradients:
    """Gradients of the members of one flat buffer."""

    def __init__(self, flat: FlatParameters, group: Group, sharding: Sharding, pool: GradientPool) -> None:
        self.flat = flat
        self.num_members = len(flat.names)
        self._group = group
        self.pieces = flat.make_pieces()
        self._pool = pool
        self._device = flat.mine.device
        self._reduce = torch_dtype(flat.buffer.reduce)
        accumulate = torch_dtype(flat.buffer.accumulate)
        self._whole_dtype = self._reduce if sharding.every_microbatch else accumulate
        self._keep_whole = sharding.keeps_gradients
        self._whole: torch.Tensor | None = None
        self.part_index = group.index
        start, stop = flat.flat.part(group.index)
        if self._keep_whole:
            kept = self._require_whole().zero_()
            self.part: torch.Tensor = kept[start:stop]
        else:
            self.part = torch.zeros(stop - start, dtype=accumulate, device=self._device)
        self.part_views = flat.kept_views(self.part)
        """Each member's view of the part."""
        self._host: torch.Tensor | None = None
        if flat.master.device != self._device:  # offloaded: a page-locked copy is the only one that is fast
            self._host = torch.zeros(stop - start, dtype=flat.master.dtype, pin_memory=True)
            self._host_views = flat.kept_views(self._host)
        self.begin_step()

    def begin_step(self) -> None:
        """Drop the last step's gradients."""
        self._waiting: dict[int, torch.Tensor] = {}
        self.used = [False] * self.num_members
        """The members that got a gradient in this step."""
        self._is_reduced = False
        self.begin_microbatch()

    def begin_microbatch(self) -> None:
        """Whole gradients start anew, after they have left."""
        self._filled = [False] * self.num_members

    def add(self, member: int, gradient: torch.Tensor) -> None:
        """Take a gradient that autograd has made."""
        self._require_whole()
        if member in self._waiting:
            self.settle()
        self._waiting[member] = gradient
        if not gradient.is_cuda:
            self.settle()

    def settle(self) -> None:
        """Move gradients into the buffer: on the host each at once, on a GPU in one launch for all that wait."""
        if not self._waiting:
            return
        new = [member for member in self._waiting if not self._filled[member]]
        if new and self._device.type == "cpu":
            for member in new:
                copy(self._views[member], self._waiting[member])
        elif new:
            torch._foreach_copy_([self._views[m] for m in new], [self._waiting[m] for m in new])
        if len(new) < len(self._waiting):
            old = [member for member in self._waiting if self._filled[member]]
            torch._foreach_add_([self._views[m] for m in old], [self._waiting[m] for m in old])
        for member in new:
            self._filled[member] = self.used[member] = True
        self._waiting = {}

    def start_reduction(self, *, is_last: bool) -> Reduction:
        """Begin to bring the sum over ranks to this rank's part; new gradients go elsewhere meanwhile."""
        borrowed = []
        self.settle()
        whole = self._require_whole()
        for member, filled in enumerate(self._filled):
            if not filled:
                self._views[member].zero_()
        if not self._keep_whole:
            borrowed.append(whole)
            self._whole = None
        if self._group.size > 1 and self._reduce != whole.dtype:
            whole = self._borrow(self._reduce).copy_(whole)
            borrowed.append(whole)
        received = None
        if uses_messages(self._group, whole):
            received = self._pool.borrow(whole.numel(), whole.dtype, travels=False)
            borrowed.append(received)
        is_added, self._is_reduced = self._is_reduced, True
        pending = reduce_scatter(self.part, whole, self._group, add=is_added, received=received, wait=False)
        return Reduction(gradients=self, pending=pending, borrowed=tuple(borrowed), is_last=is_last)

    def start_replication(self, group: Group) -> Pending:
        """Begin to add up this part over ranks that keep the same one."""
        if self._reduce == self.part.dtype:
            return all_reduce(self.part, group, wait=False)
        narrow = self.part.to(self._reduce)

        def widen() -> None:
            self.part.copy_(narrow)

        return all_reduce(narrow, group, wait=False, after=widen)

    def hand_over(self) -> None:
        """Give the optimizer's tensors their gradients; those on the host are there once the device has caught up."""
        if self._host is not None:
            self._host.copy_(self.part, non_blocking=True)
            views = self._host_views
        elif self.part.dtype != self.flat.master.dtype:
            views = self.flat.kept_views(self.part.to(self.flat.master.dtype))
        else:
            views = self.part_views
        for piece, view in zip(self.pieces, views, strict=True):
            piece.tensor.grad = view

    def _require_whole(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = self._borrow(self._whole_dtype)
            self._views = self.flat.member_views(self._whole)
        return self._whole

    def _borrow(self, dtype: torch.dtype) -> torch.Tensor:
        return self._pool.borrow(self.flat.flat.numel, dtype, travels=dtype == self._reduce)
