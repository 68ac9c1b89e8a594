"""The gradients of one flat buffer of parameters: where they add up, what travels, and what the optimizer is given.

whole    this rank's own gradients of all members, in the dtype they add up in (or, where they leave after every
         microbatch, travel in); kept, or borrowed from a pool for as long as they are needed
part     this rank's part of the sum over ranks; a window on `whole` where that is kept anyway
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
from weft.plan.partition.zero import pick


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSettings:
    """What a plan says of gradients."""

    accumulate: torch.dtype
    """Of sums over microbatches; a wider parameter's own dtype wins over float32."""
    reduce: torch.dtype
    """Of what travels; a wider parameter's own dtype wins over float32."""
    every_microbatch: bool
    """Reduced after every microbatch, or after the last."""
    keep_whole: bool
    """Whether the memory of whole gradients is kept from step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One buffer's reduction under way."""

    gradients: Gradients
    pending: Pending
    borrowed: tuple[torch.Tensor, ...]
    is_last: bool
    """Nothing will be added to the part in this step any more."""


class GradientPool:
    """Buffers that are borrowed for a while and handed back, so that memory is neither kept twice nor made anew.

    Of about one size there are never more than were out at once, and none larger than the largest asked for: where all
    that are free are a little too small, one of them makes way.
    """

    def __init__(self, room: BufferAllocator) -> None:
        self._room = room
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def borrow(self, numel: int, dtype: torch.dtype, *, travels: bool) -> torch.Tensor:
        """A buffer with anything in it; one that travels had better lie where the group can see it."""
        free = self._free.setdefault(dtype, [])
        place = pick([buffer.numel() for buffer in free], numel)
        found = free.pop(place) if place is not None else None
        if found is None or found.numel() < numel:
            del found
            found = self._room.empty(numel, dtype, shared=travels)
        return found[:numel]

    def hand_back(self, borrowed: torch.Tensor) -> None:
        whole = borrowed if borrowed._base is None else borrowed._base
        self._free.setdefault(whole.dtype, []).append(whole)


def gradient_room(flats: Sequence[FlatParameters], settings: GradientSettings) -> int:
    """Bytes of all that may travel at once."""
    dtypes = [_at_least(settings.reduce, flat.kind.compute) for flat in flats]
    return bytes_for([flat.flat.numel for flat in flats], dtypes)


class Gradients:
    """Gradients of the members of one flat buffer."""

    def __init__(self, flat: FlatParameters, group: Group, settings: GradientSettings, pool: GradientPool) -> None:
        self.flat = flat
        self._group = group
        self.pieces = flat.make_pieces()
        self.first_flag = 0
        """Where this buffer's flags start in the tail."""
        self._pool = pool
        self._device = flat.mine.device
        self._accumulate = _at_least(settings.accumulate, flat.kind.compute)
        self._reduce = _at_least(settings.reduce, flat.kind.compute)
        self._whole_dtype = self._reduce if settings.every_microbatch else self._accumulate
        self._keep_whole = settings.keep_whole
        self._whole: torch.Tensor | None = None
        start, stop = flat.flat.part(group.index)
        if self._keep_whole:
            kept = self._borrow(self._whole_dtype).zero_()
            self._take(kept)
            self.part: torch.Tensor = kept[start:stop]
        else:
            self.part = torch.zeros(stop - start, dtype=self._accumulate, device=self._device)
        self._part_views = flat.kept_views(self.part)
        self._host: torch.Tensor | None = None
        if flat.master.device != self._device:  # offloaded: a page-locked copy is the only one that is fast
            self._host = torch.zeros(stop - start, dtype=flat.kind.master, pin_memory=True)
            self._host_views = flat.kept_views(self._host)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self._waiting: dict[int, torch.Tensor] = {}
        self._used = [False] * len(self.flat.names)
        self._is_reduced = False
        self.begin_microbatch()

    def begin_microbatch(self) -> None:
        """Whole gradients start anew, after they have left."""
        self._filled = [False] * len(self.flat.names)
        self._ready: set[int] = set()
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        """Every gradient that will come has come."""
        return self.is_closed or len(self._ready) == len(self.flat.names)

    @property
    def unused(self) -> list[int]:
        """Members that got no gradient in this step."""
        return [member for member, used in enumerate(self._used) if not used]

    def add(self, member: int, gradient: torch.Tensor, *, is_last: bool) -> None:
        """Take a gradient that has become ready; `is_last`: no other will come for this member before it leaves."""
        if self._whole is None:
            self._take(self._borrow(self._whole_dtype))
        if member in self._waiting:
            self.settle()
        self._waiting[member] = gradient
        if not gradient.is_cuda:
            self.settle()
        if is_last:
            self._ready.add(member)

    def so_far(self, member: int) -> torch.Tensor:
        """What has added up of a member's gradient, to be added to in place."""
        self.settle()
        if self._whole is None:
            self._take(self._borrow(self._whole_dtype))
        if not self._filled[member]:
            self._views[member].zero_()
            self._filled[member] = self._used[member] = True
        return self._views[member]

    def set_ready(self, member: int) -> None:
        """No other gradient will come for this member before it leaves."""
        self._ready.add(member)

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
            self._filled[member] = self._used[member] = True
        self._waiting = {}

    def start_reduction(self, *, is_last: bool) -> Reduction:
        """Begin to bring the sum over ranks to this rank's part; new gradients go elsewhere meanwhile."""
        borrowed = []
        self.settle()
        if self._whole is None:
            self._take(self._borrow(self._whole_dtype))
        whole = self._whole
        assert whole is not None
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

    def hand_back(self, borrowed: Sequence[torch.Tensor]) -> None:
        """A reduction is complete: others may use what it borrowed."""
        for buffer in borrowed:
            self._pool.hand_back(buffer)

    def start_replication(self, group: Group) -> Pending:
        """Begin to add up this part over ranks that keep the same one."""
        if self._reduce == self.part.dtype:
            return all_reduce(self.part, group, wait=False)
        narrow = self.part.to(self._reduce)
        return all_reduce(narrow, group, wait=False, after=lambda: self._widen(narrow))

    def hand_over(self) -> None:
        """Give the optimizer's tensors their gradients; those on the host are there once the device has caught up."""
        if self._host is not None:
            self._host.copy_(self.part, non_blocking=True)
            views = self._host_views
        elif self.part.dtype != self.flat.kind.master:
            views = self.flat.kept_views(self.part.to(self.flat.kind.master))
        else:
            views = self._part_views
        for piece, view in zip(self.pieces, views, strict=True):
            piece.tensor.grad = view

    def _widen(self, narrow: torch.Tensor) -> None:
        self.part.copy_(narrow)

    def _take(self, whole: torch.Tensor) -> None:
        self._whole = whole
        self._views = self.flat.member_views(whole)

    def _borrow(self, dtype: torch.dtype) -> torch.Tensor:
        return self._pool.borrow(self.flat.flat.numel, dtype, travels=dtype == self._reduce)


def _at_least(planned: torch.dtype, own: torch.dtype) -> torch.dtype:
    """ "fp32" never narrows a float64 model; an explicit 16-bit format does what it says."""
    return torch.promote_types(planned, own) if planned == torch.float32 else planned
