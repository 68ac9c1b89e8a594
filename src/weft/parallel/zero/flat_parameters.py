"""Parameters that live in one flat buffer, of which each rank keeps a part: the basis of every ZeRO stage.

    whole    |  weight   | bias | weight        |pad|    in the compute dtype; a parameter is a view of it
    mine                 |  this rank's part |           in the compute dtype
    master               |  this rank's part |           what the optimizer updates: float32, on the host if offloaded

Where the master has the compute dtype and device it *is* `mine`, and where parameters stay whole (stages 0 to 2) `mine`
is a view of `whole`; so nothing is kept twice. At stage 3 the storage of `whole` is resized to nothing and back, so
that views which autograd saved are right again once it is gathered. Ranks that share memory have one whole among them,
of which each writes its part: nothing is resized, and a gather only waits until all parts are up to date.
While `whole` is freed its parameters are a NaN of a shape that fits nothing: code that uses one outside its turn gets
an error about its shape, or NaN, but neither old memory nor a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.comm.collectives import Pending, all_gather, broadcast
from weft.comm.exchange_buffers import BufferAllocator, bytes_for, common_empty
from weft.comm.group import Group
from weft.layout import Layout
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.partition.flat_buffers import FlatBuffer

PLACEHOLDER_NUMEL = 7919
"""A prime that no layer is likely to have as a width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """This rank's part of one parameter, as the optimizer sees it."""

    name: str
    tensor: nn.Parameter
    layout: Layout


class FlatParameters:
    """Parameters in one flat buffer, shared out over the ranks of a group."""

    def __init__(
        self,
        buffer: FlatBuffer,
        parameters: Sequence[nn.Parameter],
        *,
        layouts: Sequence[Layout],
        group: Group,
        source: Sequence[Group],
        keep_whole: bool,
        device: torch.device,
        master_device: torch.device,
    ) -> None:
        """Take over parameters, with the values of the first rank of the groups of `source`; collective."""
        self.buffer = buffer
        self.names = buffer.names
        self.flat = buffer.flat
        self.trainable = buffer.trainable
        self.parameters = tuple(parameters)
        self.shapes = tuple(tuple(parameter.shape) for parameter in self.parameters)
        self._layouts = layouts
        self.group = group
        self._keep_whole = keep_whole
        master_device = device if device.type == "meta" else master_device  # what has no memory has none anywhere
        self._pending: Pending | None = None
        start, stop = self.flat.part(group.index)
        staged = self._stage(source, device)
        self.is_common = False
        """`whole` is one piece of memory for all ranks of the group together."""
        self.whole = self._place(staged)
        self.mine = self.whole[start:stop] if keep_whole or self.is_common else self.whole[start:stop].clone()
        is_same = buffer.compute == buffer.master and master_device == device
        self.master = self.mine if is_same or not buffer.trainable else _copy(staged[start:stop], master_device)
        self._views = self.member_views(self.whole)
        self._placeholder = self.whole.new_empty(0)
        if self.whole.is_floating_point():
            self._placeholder = self.whole.new_full((1,), float("nan")).expand(PLACEHOLDER_NUMEL)
        self._num_bytes = self.whole.nbytes
        self.lend()
        self.is_whole = True
        if not keep_whole:
            self.free()

    @torch.no_grad()
    def _stage(self, source: Sequence[Group], device: torch.device) -> torch.Tensor:
        """The whole buffer in the master's dtype, with the first rank's values."""
        staged = torch.zeros(self.flat.numel, dtype=torch_dtype(self.buffer.master), device=device)
        for parameter, view in zip(self.parameters, self.member_views(staged), strict=True):
            view.copy_(parameter)
        for one in source:
            broadcast(staged, one)
        return staged

    def _place(self, staged: torch.Tensor) -> torch.Tensor:
        """The whole buffer in the compute dtype, where it will live.

        Ranks that share memory need no more than one among them where it is freed and gathered; where each keeps its
        own, the others read their parts of it.
        """
        device, dtype = staged.device, torch_dtype(self.buffer.compute)
        if self.group.shared is None or device.type != "cpu":
            return staged.to(dtype)
        start, stop = self.flat.part(self.group.index)
        if self._keep_whole:
            allocator = BufferAllocator(self.group, device, num_bytes=bytes_for([staged.numel()], [dtype]))
            return allocator.empty(staged.numel(), dtype).copy_(staged)
        common = common_empty(self.group, device, staged.numel(), dtype)
        if common is None:
            return staged.to(dtype)
        self.is_common = True
        common[start:stop].copy_(staged[start:stop])
        return common

    def member_views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a buffer laid out like this one, in the parameters' shapes."""
        places = zip(self.flat.offsets, self.flat.numels, self.shapes, strict=True)
        return tuple(flat[offset : offset + numel].view(shape) for offset, numel, shape in places)

    def kept_views(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each member's view of a part laid out like `mine`: in its shape if there is one part only, else flat."""
        if self.flat.num_parts == 1:
            return self.member_views(part)
        part_start, _ = self.flat.part(self.group.index)
        views = []
        for member, offset in enumerate(self.flat.offsets):
            start, stop = self.flat.kept(member, self.group.index)
            first = offset + start - part_start if start < stop else 0
            views.append(part[first : first + stop - start])
        return tuple(views)

    def layout(self, member: int) -> Layout:
        """This rank's placement in the global tensor."""
        layout = self._layouts[member]
        if self.flat.num_parts == 1:
            return layout
        return replace(layout, flat_range=self.flat.kept(member, self.group.index))

    def make_pieces(self) -> tuple[Piece, ...]:
        """One tensor per member on every rank for the optimizer, empty where the rank keeps nothing of it."""
        return tuple(
            Piece(name=self.names[member], tensor=nn.Parameter(view), layout=self.layout(member))
            for member, view in enumerate(self.kept_views(self.master))
        )

    def start_gather(self) -> None:
        """Begin to bring all parts together; the parameters are whole when `wait` has returned."""
        if self.is_whole:
            return
        if not self.is_common:
            self.whole.untyped_storage().resize_(self._num_bytes)
        self._pending = all_gather(self.whole, self.mine, self.group, wait=False)
        self.lend()
        self.is_whole = True

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def free(self) -> None:
        """Give the memory of the whole back; the part stays."""
        if self._keep_whole or not self.is_whole:
            return
        self.wait()
        self.withdraw()
        if not self.is_common:
            self.whole.untyped_storage().resize_(0)
        self.is_whole = False

    @torch.no_grad()
    def take_master(self) -> None:
        """After an update: copy the master into the part in the compute dtype, where they are two tensors."""
        if self.master is not self.mine:
            self.mine.copy_(self.master, non_blocking=True)

    def start_refresh(self) -> Pending:
        """After an update of parameters that stay whole: begin to gather all ranks' parts in place."""
        return all_gather(self.whole, self.mine, self.group, wait=False)

    def withdraw(self) -> None:
        """Let parameters be placeholders."""
        for parameter in self.parameters:
            parameter.data = self._placeholder

    def lend(self) -> None:
        """Let parameters be their places in the whole."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view


def wait_until_read(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until a GPU has read what it was given of these; before the host overwrites them outside of a step.

    A copy from page-locked memory (`take_master`) is made when the GPU comes to it. Steps need no such wait: the host
    has waited for their gradients, which come after it.
    """
    if any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors):
        torch.cuda.synchronize()


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device; page-locked where it leaves a GPU for the host, the only memory that moves fast."""
    copied = tensor.to(device, copy=True)
    return copied.pin_memory() if tensor.is_cuda and device.type == "cpu" else copied
