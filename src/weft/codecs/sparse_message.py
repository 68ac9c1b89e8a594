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

from weft.codecs.native.sparse import find_loops
from weft.plan.exchange.sparse import CHUNK_NUMEL, SparseLayout

_LARGEST_CODE = 127
_NOTHING = -0.0
"""What may be added to any number without changing it, even to the sign of a zero."""


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
    """The sections of one message, and a row of values that are not rounded yet."""

    def __init__(self, layout: SparseLayout, message: torch.Tensor, dtype: torch.dtype) -> None:
        """`message`: uint8, of the layout's bytes."""
        self.layout = layout
        bits, num_entries = layout.bits, layout.num_entries
        self._counts = message[: 4 * layout.num_chunks].view(torch.int32)
        self._offsets = message[layout.offsets_at : layout.offsets_at + 2 * num_entries].view(torch.int16)
        if bits == 32:
            self._row = message[layout.values_at : layout.values_at + num_entries * dtype.itemsize].view(dtype)
        else:
            self._row = torch.empty(num_entries, dtype=dtype, device=message.device)
            stop = layout.scales_at + 2 * len(layout.entries) * dtype.itemsize
            self._scales = message[layout.scales_at : stop].view(dtype).view(-1, 2)
            self._codes = message[layout.values_at : layout.values_at + -(-num_entries * bits // 8)]

    def entries(self, place: int) -> Entries:
        """Those of the tensor at this place of the bucket, to be written, or to be read after `unpack`."""
        first_chunk, stop_chunk = self.layout.chunks[place]
        first, stop = self.layout.entries[place]
        return Entries(
            counts=self._counts[first_chunk:stop_chunk],
            offsets=self._offsets[first:stop],
            values=self._row[first:stop],
        )

    def pack(self) -> None:
        """Round the values that were written into the entries; these end as what rounding took from them."""
        bits = self.layout.bits
        if bits == 32:
            return
        codes = torch.empty(self._row.shape, dtype=torch.uint8, device=self._row.device)
        for place, (first, stop) in enumerate(self.layout.entries):
            entries = self.entries(place)
            write = _to_8_bits if bits == 8 else _to_2_bits
            codes[first:stop], scales = write(entries)
            self._scales[place] = scales
            entries.values.sub_(_from_codes(bits, codes[first:stop], scales))
        self._codes.copy_(codes if bits == 8 else _pack_4(codes))

    def unpack(self) -> None:
        """Give the entries the values that were sent."""
        bits = self.layout.bits
        if bits == 32:
            return
        codes = self._codes if bits == 8 else _unpack_4(self._codes)
        for place, (first, stop) in enumerate(self.layout.entries):
            self._row[first:stop] = _from_codes(bits, codes[first:stop], self._scales[place])


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
    messages: Sequence[Entries], target: torch.Tensor, *, scale: float = 1.0, is_fresh: bool = False
) -> None:
    """target += scale × the entries of some messages, at their elements of the tensor; a target that `is_fresh` becomes
    that, whatever it holds. A message has each element once at most, so only the order of messages matters."""
    loops = None if target.is_cuda else find_loops()
    if loops is not None:
        loops.add(
            target,
            counts=[entries.counts for entries in messages],
            offsets=[entries.offsets for entries in messages],
            values=[entries.values for entries in messages],
            scale=scale,
            is_fresh=is_fresh,
        )
        return
    if is_fresh:
        target.zero_()
    for entries in messages:
        ends = entries.counts.cumsum(0)
        slots = torch.arange(entries.values.numel(), device=target.device)
        is_used = slots < ends[-1:]
        chunks = torch.searchsorted(ends, slots, right=True)
        positions = torch.where(is_used, chunks * CHUNK_NUMEL + (entries.offsets.to(torch.int64) & 0xFFFF), 0)
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
    is_upper = sizes > sizes.sum() / num_sent.clamp(min=1)
    scales = [
        torch.where(group, sizes, 0).sum() / group.sum().clamp(min=1)
        for group in (is_used & ~is_upper, is_used & is_upper)
    ]
    codes = is_upper.to(torch.uint8) + 2 * (entries.values < 0).to(torch.uint8)
    return codes, torch.stack(scales)


def _from_codes(bits: int, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if bits == 8:
        return codes.view(torch.int8).to(scales.dtype) * scales[0]
    sizes = torch.where((codes & 1).bool(), scales[1], scales[0])
    return torch.where((codes & 2).bool(), -sizes, sizes)


def _pack_4(codes: torch.Tensor) -> torch.Tensor:
    four = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    return four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6


def _unpack_4(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).view(-1)
