"""The k-th largest size of each tensor on a GPU, exactly: digit by digit of the bits of numbers; needs Triton.

Positive floating-point numbers are in the order of their bits. Each pass counts how often every value of the next
digit occurs among numbers that begin with the digits found so far; then one program per tensor takes the digit in
which the k-th largest lies. Counts are integers, so they do not depend on the order of programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.codecs.triton_kernels.common import BLOCK, NUM_WARPS, part_of
from weft.codecs.triton_kernels.tables import Table
from weft.plan.exchange.gpu_scratch import COUNT_COPIES

_DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))
"""Of the 31 bits of a size: lowest bit, and number of bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Elements that reach their tensor's threshold: noted places of blocks, or all of a block that has more."""

    table: Table
    first: torch.Tensor
    second: torch.Tensor
    turn: torch.Tensor
    """The new state is `first` if this is 1."""
    thresholds: torch.Tensor
    notes: torch.Tensor
    noted: torch.Tensor
    room: int

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        return self.first, self.second, self.turn, self.thresholds, self.notes, self.noted


class Selection:
    """The search in all tensors of a bucket at once."""

    def __init__(self, num_tensors: int, device: torch.device) -> None:
        self._num_tensors = num_tensors
        self._counts = torch.zeros(num_tensors * COUNT_COPIES * 256, dtype=torch.int32, device=device)
        self.state = torch.zeros(num_tensors, 4, dtype=torch.int32, device=device)
        """Of each tensor: the digits found so far; how many numbers that begin with them are among the k largest;
        whether there is anything to find; whether all its elements are looked at."""
        self._thresholds = torch.zeros(num_tensors, dtype=torch.float32, device=device)

    def of_sizes(self, table: Table, sizes: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """The threshold of each tensor: the size of this rank, counted from 1; 0 for rank 0."""
        self.state.zero_()
        for number, (low, width) in enumerate(_DIGITS):
            self._counts.zero_()
            _count_sizes[(table.num_programs,)](
                table.tensor_of, table.fields, sizes, self.state, self._counts,
                LOW=low, BITS=width, FIRST=number == 0, COPIES=COUNT_COPIES, BLOCK=BLOCK, WIDTH=table.width,
                num_warps=NUM_WARPS,
            )  # fmt: skip
            self._take_digit(ranks, number)
        return self._thresholds

    def of_noted(self, noted: Noted, rooms: torch.Tensor, *, must_fill: bool) -> torch.Tensor:
        """The state of each tensor after the search for its k-th largest. With `must_fill`, tensors of which fewer
        than k reach the threshold are searched whole."""
        self.state.zero_()
        self._counts.zero_()
        self._count_noted(noted, 0, only_whole=False)
        if must_fill:
            _look_at_all[(self._num_tensors,)](rooms, noted.thresholds, self.state, self._counts, COPIES=COUNT_COPIES)
            self._count_noted(noted, 0, only_whole=True)
        self._take_digit(rooms, 0)
        for number in range(1, len(_DIGITS)):
            self._counts.zero_()
            self._count_noted(noted, number, only_whole=False)
            self._take_digit(rooms, number)
        return self.state

    def _count_noted(self, noted: Noted, number: int, *, only_whole: bool) -> None:
        (low, width), table = _DIGITS[number], noted.table
        _count_noted_sizes[(table.num_programs,)](
            table.tensor_of, table.fields, *noted.pointers, self.state, self._counts,
            LOW=low, BITS=width, FIRST=number == 0, ONLY_WHOLE=only_whole, COPIES=COUNT_COPIES, BLOCK=BLOCK,
            NOTES=noted.room, WIDTH=table.width, num_warps=NUM_WARPS,
        )  # fmt: skip

    def _take_digit(self, ranks: torch.Tensor, number: int) -> None:
        _take[(self._num_tensors,)](
            ranks, ranks.stride(0), self.state, self._counts, self._thresholds,
            BITS=_DIGITS[number][1], FIRST=number == 0, COPIES=COUNT_COPIES,
        )  # fmt: skip


@triton.jit
def bits_of(x):
    """The size of numbers as integers of the same order."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def noted_part(fields, chunk, notes, noted, state, tensor, BLOCK: tl.constexpr, NOTES: tl.constexpr):
    """(whether this chunk must be read whole; places of its noted elements in it; which of them are)."""
    blocks: tl.constexpr = 65536 // BLOCK
    numel = tl.load(fields + 1)
    block = chunk.to(tl.int64) * blocks + tl.arange(0, blocks)
    at = tl.load(fields + 2) + block
    count = tl.load(noted + at, mask=block * BLOCK < numel, other=0)
    is_whole = (tl.max(count) > NOTES) | (tl.load(state + 4 * tensor + 3) != 0)
    slot = tl.arange(0, NOTES)
    here = (slot[None, :] < count[:, None]) & (is_whole == 0)
    place = tl.load(notes + at[:, None] * NOTES + slot[None, :], mask=here, other=0).to(tl.int32)
    place += (tl.arange(0, blocks) * BLOCK)[:, None]
    return is_whole, tl.reshape(place, (blocks * NOTES,)), tl.reshape(here, (blocks * NOTES,))


@triton.jit
def block_of_chunk(fields, at_v, chunk, block, threshold, is_all, BLOCK: tl.constexpr):
    """(places in the chunk, values, which reach the threshold) of a block of a chunk that is read whole."""
    offset = tl.load(fields)
    numel = tl.load(fields + 1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    entry = chunk.to(tl.int64) * 65536 + place
    x = tl.load(at_v + offset + entry, mask=entry < numel, other=0.0)
    reaches = (tl.abs(x) > 0.0) & ((tl.abs(x) >= threshold) | is_all)
    return place, x, reaches


@triton.jit
def _add_digits(sizes, here, at_counts, LOW: tl.constexpr, BITS: tl.constexpr):
    digit = (sizes >> LOW) & ((1 << BITS) - 1)
    tl.atomic_add(at_counts + digit, tl.where(here, 1, 0), mask=here, sem="relaxed")


@triton.jit
def _add_histogram(sizes, here, at_counts, LOW: tl.constexpr, BITS: tl.constexpr):
    found = tl.histogram((sizes >> LOW) & ((1 << BITS) - 1), 256, mask=here)
    tl.atomic_add(at_counts + tl.arange(0, 256), found, mask=found > 0, sem="relaxed")


@triton.jit
def _count_sizes(
    tensor_of, fields, sizes, state, counts,
    LOW: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, block = part_of(tensor_of, fields, WIDTH)
    at = tl.load(row + 1)
    numel = tl.load(row + 2)
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = bits_of(tl.load(sizes + at + entry, mask=entry < numel, other=0.0))
    here = entry < numel
    if not FIRST:
        here = here & ((size >> (LOW + BITS)) == tl.load(state + 4 * tensor))
    at_counts = counts + (tensor * COPIES + block % COPIES) * 256
    _add_histogram(size, here, at_counts, LOW, BITS)


@triton.jit
def _count_noted_sizes(
    tensor_of, fields, first, second, turn, thresholds, notes, noted, state, counts,
    LOW: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, ONLY_WHOLE: tl.constexpr, COPIES: tl.constexpr,
    BLOCK: tl.constexpr, NOTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, chunk = part_of(tensor_of, fields, WIDTH)
    is_on = True
    if ONLY_WHOLE:
        is_on = tl.load(state + 4 * tensor + 3) != 0
    if not FIRST:
        is_on = tl.load(state + 4 * tensor + 2) != 0
    if is_on:
        at_v = second
        if tl.load(turn) != 0:
            at_v = first
        prefix = tl.load(state + 4 * tensor)
        at_counts = counts + (tensor * COPIES + chunk % COPIES) * 256
        is_whole, place, here = noted_part(row, chunk, notes, noted, state, tensor, BLOCK, NOTES)
        if is_whole:
            threshold = tl.load(thresholds + tensor)
            is_all = tl.load(state + 4 * tensor + 3) != 0
            for block in range(65536 // BLOCK):
                place_b, x_b, here_b = block_of_chunk(row, at_v, chunk, block, threshold, is_all, BLOCK)
                size_b = bits_of(x_b)
                if not FIRST:
                    here_b = here_b & ((size_b >> (LOW + BITS)) == prefix)
                _add_histogram(size_b, here_b, at_counts, LOW, BITS)
        else:
            at = at_v + (tl.load(row) + chunk.to(tl.int64) * 65536)
            size = bits_of(tl.load(at + place, mask=here, other=0.0))
            if not FIRST:
                here = here & ((size >> (LOW + BITS)) == prefix)
            _add_digits(size, here, at_counts, LOW, BITS)


@triton.jit
def _look_at_all(rooms, thresholds, state, counts, COPIES: tl.constexpr):
    tensor = tl.program_id(0)
    digit = tl.arange(0, COPIES * 256)
    at = counts + tensor * COPIES * 256 + digit
    if (tl.sum(tl.load(at)) < tl.load(rooms + 2 * tensor)) & (tl.load(thresholds + tensor) > 0.0):
        tl.store(state + 4 * tensor + 3, 1)
        tl.debug_barrier()
        tl.store(at, tl.zeros((COPIES * 256,), dtype=tl.int32))


@triton.jit(do_not_specialize=["stride"])
def _take(
    ranks, stride, state, counts, thresholds, BITS: tl.constexpr, FIRST: tl.constexpr, COPIES: tl.constexpr
):  # fmt: skip
    tensor = tl.program_id(0)
    at_state = state + 4 * tensor
    digit = tl.arange(0, 256)
    copy = tl.arange(0, COPIES)
    count = tl.sum(tl.load(counts + (tensor * COPIES + copy[:, None]) * 256 + digit[None, :]), axis=0)
    total = tl.sum(count)
    remaining = tl.load(at_state + 1)
    prefix = tl.load(at_state)
    is_on = tl.load(at_state + 2) != 0
    if FIRST:
        remaining = tl.load(ranks + tensor * stride).to(tl.int32)
        is_on = (total >= remaining) & (remaining > 0)
    if is_on:
        from_here_on = total - tl.cumsum(count, 0) + count
        found = tl.sum((from_here_on >= remaining).to(tl.int32)) - 1
        prefix = (prefix << BITS) | found
        tl.store(at_state, prefix)
        tl.store(at_state + 1, remaining - tl.sum(tl.where(digit > found, count, 0)))
        tl.store(at_state + 2, 1)
        tl.store(thresholds + tensor, prefix.to(tl.float32, bitcast=True))
    else:
        if FIRST:
            tl.store(at_state, -1)  # all are larger
            tl.store(at_state + 1, 0)
            tl.store(at_state + 2, 0)
            tl.store(thresholds + tensor, 0.0)
