"""Parameters that live in one flat buffer, of which each rank keeps a part: the ground under every ZeRO stage.

    whole    |  weight   | bias | weight        |pad|    in the compute dtype; a parameter is a view of it
    mine                 |  this rank's part |           in the compute dtype
    master               |  this rank's part |           what the optimizer updates: float32, on the host if offloaded

Where the master has the compute dtype and device it *is* `mine`, and where parameters stay whole (stages 0 to 2) `mine`
is a window on `whole`; so nothing is kept twice. Where they do not (stage 3) the memory of `whole` comes and goes:
the storage is resized to nothing and back, so that views which autograd saved are right again once it is gathered.
Ranks that share memory have one whole among them, of which each writes its part: nothing comes, nothing goes, and a
gather only waits until all parts are up to date.
Meanwhile the parameters are a NaN of a shape that fits nothing: whoever uses one outside its turn gets an error about
its shape, or NaN, but neither old memory nor a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.comm.collectives import Pending, all_gather, broadcast
from weft.comm.exchange_buffers import BufferAllocator, bytes_for, common_empty
from weft.comm.group import Group
from weft.layout import Layout
from weft.plan.partition.zero import Flat

_ABSENT_NUMEL = 7919
"""A prime that no layer is likely to have as a width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What this rank keeps of one parameter, as the optimizer sees it."""

    name: str
    tensor: nn.Parameter
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatKind:
    """What all members of a flat have in common."""

    compute: torch.dtype
    """Of the parameters as the model uses them."""
    master: torch.dtype
    """Of what the optimizer updates."""
    trainable: bool


class FlatParameters:
    """Parameters of one kind in one flat buffer, shared out over the ranks of a group."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        layouts: Sequence[Layout] | None = None,
        kind: FlatKind,
        group: Group,
        sources: Sequence[Group],
        keep_whole: bool,
        device: torch.device,
        master_device: torch.device,
    ) -> None:
        """Take over parameters, which are whole unless `layouts` says otherwise. The first rank's values along
        `sources` become everybody's; collective."""
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self.shapes = tuple(tuple(parameter.shape) for parameter in self.parameters)
        self._layouts = layouts or [Layout(global_shape=shape) for shape in self.shapes]
        self.kind = kind
        self.group = group
        self.flat = Flat(numels=tuple(parameter.numel() for parameter in self.parameters), num_parts=group.size)
        self._keep_whole = keep_whole
        master_device = device if device.type == "meta" else master_device  # what has no memory has none anywhere
        self._pending: Pending | None = None
        start, stop = self.flat.part(group.index)
        staged = self._stage(sources, device)
        self.is_common = False
        """`whole` is one piece of memory for all ranks of the group together."""
        self.whole = self._place(staged)
        self.mine = self.whole[start:stop] if keep_whole or self.is_common else self.whole[start:stop].clone()
        is_same = kind.compute == kind.master and master_device == device
        self.master = self.mine if is_same or not kind.trainable else _copy(staged[start:stop], master_device)
        self._views = self.member_views(self.whole)
        self._absent = _absent(kind.compute, device)
        self._num_bytes = self.whole.nbytes
        self._lend()
        self.is_whole = True
        if not keep_whole:
            self.free()

    @torch.no_grad()
    def _stage(self, sources: Sequence[Group], device: torch.device) -> torch.Tensor:
        """The whole buffer in the master's dtype, with the first rank's values."""
        staged = torch.zeros(self.flat.numel, dtype=self.kind.master, device=device)
        for parameter, view in zip(self.parameters, self.member_views(staged), strict=True):
            view.copy_(parameter)
        for group in sources:
            broadcast(staged, group)
        return staged

    def _place(self, staged: torch.Tensor) -> torch.Tensor:
        """The whole buffer in the compute dtype, where it will live.

        Ranks that share memory need no more than one among them where parameters come and go; where each keeps its own,
        the others read their parts of it.
        """
        device, dtype = staged.device, self.kind.compute
        if self.group.shared is None or device.type != "cpu":
            return staged.to(dtype)
        start, stop = self.flat.part(self.group.index)
        if self._keep_whole:
            room = BufferAllocator(self.group, device, num_bytes=bytes_for([staged.numel()], [dtype]))
            return room.empty(staged.numel(), dtype).copy_(staged)
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
        """This rank's place in a member."""
        layout = self._layouts[member]
        if self.flat.num_parts == 1:
            return layout
        return replace(layout, flat_range=self.flat.kept(member, self.group.index))

    def make_pieces(self) -> tuple[Piece, ...]:
        """What the optimizer is given: one tensor a member on every rank, empty where the rank keeps nothing of it."""
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
        self._lend()
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
        for parameter in self.parameters:
            parameter.data = self._absent
        if not self.is_common:
            self.whole.untyped_storage().resize_(0)
        self.is_whole = False

    @torch.no_grad()
    def take_master(self) -> None:
        """After an update: the part in the compute dtype follows the master."""
        if self.master is not self.mine:
            self.mine.copy_(self.master, non_blocking=True)

    def start_refresh(self) -> Pending:
        """After an update of parameters that stay whole: begin to bring all ranks' parts together, in place."""
        return all_gather(self.whole, self.mine, self.group, wait=False)

    def _lend(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view


def _absent(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.full((1,), float("nan"), dtype=dtype, device=device).expand(_ABSENT_NUMEL)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On another device than its own that is the host: page-locked, which is the only memory that moves fast."""
    copied = tensor.to(device, copy=True)
    return copied.pin_memory() if tensor.is_cuda and device.type == "cpu" else copied
