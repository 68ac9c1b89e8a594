"""Messages of topk and dgc, written and read: entries of each tensor, their places, and values in fewer bits.

The format is that of `plan/exchange/sparse.py`. All shapes here are known beforehand, whatever the values are, so that
a GPU never has to be asked how many entries there are.

Values of 8 bits are multiples of the tensor's largest one over 127, rounded to nearest, ties to even. Values of 2 bits
are a sign and one of two sizes: entries up to the mean size of all, and those above it, are each sent as the mean size
of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.codecs.formats.packed_bits import pack, unpack
from weft.codecs.native.sparse import Numbers, find_loops, numbers
from weft.plan.exchange.sparse import CHUNK_NUMEL, SparseLayout

_LARGEST_CODE = 127
_NOTHING = -0.0
"""What may be added to any number without changing it, even to the sign of a zero."""


class Places:
    """Where the tensors of a message are: their entries in it, and their elements in a flat buffer."""

    def __init__(self, layout: SparseLayout, parts: Sequence[tuple[int, int]]) -> None:
        """`parts`: first element and number of elements of each tensor."""
        self.layout, self.parts = layout, parts
        self.numbers: Numbers = numbers(
            [
                (offset, numel, first, stop - first, chunk)
                for (offset, numel), (first, stop), (chunk, _) in zip(parts, layout.entries, layout.chunks, strict=True)
            ]
        )
        """The same for compiled loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The entries of one tensor: views of a message, or of buffers of that shape."""

    counts: torch.Tensor
    """int32 [chunks of the tensor]."""
    offsets: torch.Tensor
    """int16 [room], whose bits are those of a uint16."""
    values: torch.Tensor
    """[room], of the values' own dtype."""


class SparseMessage:
    """The sections of one message."""

    def __init__(self, places: Places, message: torch.Tensor, dtype: torch.dtype) -> None:
        """`message`: uint8, of the layout's bytes."""
        self.places = places
        self.layout = layout = places.layout
        bits, num_entries = layout.bits, layout.num_entries
        self.counts = message[: 4 * layout.num_chunks].view(torch.int32)
        self.offsets = message[layout.offsets_at : layout.offsets_at + 2 * num_entries].view(torch.int16)
        self.row: torch.Tensor
        """Values of all entries: of the message itself, or, where they travel in fewer bits, beside it."""
        if bits == 32:
            self.row = message[layout.values_at : layout.values_at + num_entries * dtype.itemsize].view(dtype)
        else:
            self.row = torch.empty(num_entries, dtype=dtype, device=message.device)
            stop = layout.scales_at + 2 * len(layout.entries) * dtype.itemsize
            self._scales = message[layout.scales_at : stop].view(dtype).view(-1, 2)
            self._codes = message[layout.values_at : layout.values_at + -(-num_entries * bits // 8)]

    def entries(self, place: int) -> Entries:
        """Those of the tensor at this place of the bucket, to be written, or to be read after `unpack`."""
        first_chunk, stop_chunk = self.layout.chunks[place]
        first, stop = self.layout.entries[place]
        return Entries(
            counts=self.counts[first_chunk:stop_chunk],
            offsets=self.offsets[first:stop],
            values=self.row[first:stop],
        )

    def pack(self) -> None:
        """Round the values in the row, where they travel in fewer bits; they end as what rounding took from them. The
        rest of the message is zero before."""
        bits = self.layout.bits
        if bits == 32:
            return
        loops = None if self.row.is_cuda else find_loops()
        if loops is not None:
            loops.round(
                self.row,
                places=self.places.numbers,
                bits=bits,
                counts=self.counts,
                codes=self._codes,
                scales=self._scales,
            )
            return
        codes = torch.empty(self.row.shape, dtype=torch.uint8, device=self.row.device)
        for place, (first, stop) in enumerate(self.layout.entries):
            entries = self.entries(place)
            write = _to_8_bits if bits == 8 else _to_2_bits
            codes[first:stop], scales = write(entries)
            self._scales[place] = scales
            entries.values.sub_(_from_codes(bits, codes[first:stop], scales))
        pack(codes, bits, self._codes)

    def unpack(self) -> None:
        """Give the row the values that were sent."""
        bits = self.layout.bits
        if bits == 32:
            return
        loops = None if self.row.is_cuda else find_loops()
        if loops is not None:
            loops.expand(self.row, places=self.places.numbers, bits=bits, codes=self._codes, scales=self._scales)
            return
        codes = unpack(self._codes, bits, self.layout.num_entries)
        for place, (first, stop) in enumerate(self.layout.entries):
            self.row[first:stop] = _from_codes(bits, codes[first:stop], self._scales[place])


def write_entries(entries: Entries, values: torch.Tensor, is_sent: torch.Tensor) -> None:
    """Write the values of a tensor at the elements that are sent, of which there is room for all."""
    places = is_sent.cumsum(0, dtype=torch.int32)
    numel, num_sent = places.numel(), places[-1:]
    slots = torch.arange(entries.values.numel(), dtype=torch.int32, device=places.device)
    is_used = slots < num_sent
    positions = torch.searchsorted(places, slots + 1).clamp_(max=numel - 1)
    ends = torch.cat([places[CHUNK_NUMEL - 1 : numel - 1 : CHUNK_NUMEL], num_sent])
    entries.counts.copy_(ends.diff(prepend=ends.new_zeros(1)))
    entries.offsets.copy_(torch.where(is_used, positions % CHUNK_NUMEL, 0))
    entries.values.copy_(torch.where(is_used, values[positions], 0))


def add_entries(
    messages: Sequence[SparseMessage],
    target: torch.Tensor,
    places: Places,
    *,
    scale: float = 1.0,
    is_fresh: bool = False,
) -> None:
    """target += scale × the entries of some messages, at their elements of its tensors; of a target that `is_fresh` the
    tensors become that, whatever they hold. A message has each element once at most, so only the order of messages
    matters."""
    loops = None if target.is_cuda else find_loops()
    if loops is not None:
        loops.add(
            target,
            places=places.numbers,
            counts=[message.counts for message in messages],
            offsets=[message.offsets for message in messages],
            rows=[message.row for message in messages],
            scale=scale,
            is_fresh=is_fresh,
        )
        return
    for place, (offset, numel) in enumerate(places.parts):
        own = target[offset : offset + numel]
        if is_fresh:
            own.zero_()
        for message in messages:
            _add(message.entries(place), own, scale)


def _add(entries: Entries, target: torch.Tensor, scale: float) -> None:
    ends = entries.counts.cumsum(0)
    slots = torch.arange(entries.values.numel(), device=target.device)
    is_used = slots < ends[-1:]
    chunks = torch.searchsorted(ends, slots, right=True)
    positions = chunks * CHUNK_NUMEL + (entries.offsets.to(torch.int64) & 0xFFFF)
    is_used &= positions < target.numel()  # else the message was damaged
    positions = torch.where(is_used, positions, 0)
    values = entries.values if scale == 1.0 else entries.values * scale
    target.index_add_(0, positions, torch.where(is_used, values, _NOTHING))


def _to_8_bits(entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, as uint8 that are the bits of int8, and [scale, 0]."""
    scale = entries.values.abs().amax() / _LARGEST_CODE
    codes = (entries.values / scale).nan_to_num_(nan=0.0).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.to(torch.int8).view(torch.uint8), torch.stack([scale, torch.zeros_like(scale)])


def _to_2_bits(entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, and [mean size of the lower group, mean size of the upper group]."""
    sizes, num_sent = entries.values.abs(), entries.counts.sum()
    is_used = torch.arange(sizes.numel(), device=sizes.device) < num_sent
    is_upper = sizes > _mean(sizes, num_sent)
    groups = (is_used & ~is_upper, is_used & is_upper)
    scales = [_mean(torch.where(group, sizes, 0), group.sum()) for group in groups]
    codes = is_upper.to(torch.uint8) + 2 * (entries.values < 0).to(torch.uint8)
    return codes, torch.stack(scales)


def _mean(sizes: torch.Tensor, num: torch.Tensor) -> torch.Tensor:
    """The sum over a number, 0 for none of them; on the host added one after the other, as compiled loops do."""
    if sizes.is_cuda:
        total = sizes.sum(dtype=torch.float64)
    else:
        total = sizes.cumsum(0, dtype=torch.float64)[-1]
    return (total / num.clamp(min=1)).to(sizes.dtype)


def _from_codes(bits: int, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if bits == 8:
        return codes.view(torch.int8).to(scales.dtype) * scales[0]
    sizes = torch.where((codes & 1).bool(), scales[1], scales[0])
    return torch.where((codes & 2).bool(), -sizes, sizes)
