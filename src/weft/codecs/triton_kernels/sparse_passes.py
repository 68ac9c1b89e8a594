"""The kernels of topk and dgc; `sparse.py` launches them. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.codecs.triton_kernels.common import flag_not_finite, key_of, part_of
from weft.codecs.triton_kernels.selection import bits_of, block_of_chunk, noted_part


@triton.jit
def _new_state(g, u, v, keep, keep_v, factors, tensor, IS_DGC: tl.constexpr):
    """(momentum, all that could be sent)."""
    velocity = g
    total = v * tl.load(keep_v).to(tl.float32)
    if IS_DGC:
        factor = tl.load(factors + 2 * tensor)
        if tl.load(factors + 2 * tensor + 1) != 0.0:
            velocity = (u * tl.load(keep).to(tl.float32) + g) * factor.to(tl.float32)
            total = total + velocity + g
        else:
            velocity = u * (tl.load(keep) * factor).to(tl.float32) + g
            total = total + velocity
    else:
        total = total + g
    return velocity, total


@triton.jit(do_not_specialize=["step", "replica"])
def sample(
    tensor_of, fields, values, first_u, second_u, first_v, second_v, turn, keep, keep_v, factors, sizes,
    step, replica,
    IS_DGC: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, block = part_of(tensor_of, fields, WIDTH)
    offset = tl.load(row)
    at = tl.load(row + 1)
    num_sampled = tl.load(row + 2)
    stride = tl.load(row + 3)
    start = key_of(tl.load(row + 4), step, replica).to(tl.int64) % stride
    old_u = first_u
    old_v = first_v
    if tl.load(turn) != 0:
        old_u = second_u
        old_v = second_v
    number = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = number < num_sampled
    entry = offset + start + number * stride
    g = tl.load(values + entry, mask=here, other=0.0)
    v = tl.load(old_v + entry, mask=here, other=0.0)
    u = v
    if IS_DGC:
        u = tl.load(old_u + entry, mask=here, other=0.0)
    velocity, total = _new_state(g, u, v, keep, keep_v, factors, tensor, IS_DGC)
    tl.store(sizes + at + number, tl.abs(total), mask=here)


@triton.jit
def accumulate(
    tensor_of, fields, values, first_u, second_u, first_v, second_v, turn, keep, keep_v, factors,
    thresholds, notes, noted, not_finite,
    IS_DGC: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr, NOTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, block = part_of(tensor_of, fields, WIDTH)
    offset = tl.load(row)
    numel = tl.load(row + 1)
    old_u = first_u
    new_u = second_u
    old_v = first_v
    new_v = second_v
    if tl.load(turn) != 0:
        old_u = second_u
        new_u = first_u
        old_v = second_v
        new_v = first_v
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 4)
        numel = tl.multiple_of(numel, 4)
        old_u = tl.multiple_of(old_u, 16)
        new_u = tl.multiple_of(new_u, 16)
        old_v = tl.multiple_of(old_v, 16)
        new_v = tl.multiple_of(new_v, 16)
    place = tl.arange(0, BLOCK)
    start = block.to(tl.int64) * BLOCK
    here = place < tl.multiple_of(tl.minimum(numel - start, BLOCK).to(tl.int32), 4 if IS_ALIGNED else 1)
    at = offset + start
    g = tl.load(values + at + place, mask=here, other=0.0)
    v = tl.load(old_v + at + place, mask=here, other=0.0)
    u = v
    if IS_DGC:
        u = tl.load(old_u + at + place, mask=here, other=0.0)
    velocity, total = _new_state(g, u, v, keep, keep_v, factors, tensor, IS_DGC)
    if IS_DGC:
        tl.store(new_u + at + place, velocity, mask=here)
    tl.store(new_v + at + place, total, mask=here)
    flag_not_finite(tl.where(here, total, 0.0), not_finite)
    reaches = here & (tl.abs(total) > 0.0) & (tl.abs(total) >= tl.load(thresholds + tensor))
    num_noted = tl.sum(reaches.to(tl.int32))
    number = tl.load(row + 2) + block
    tl.store(noted + number, num_noted)
    if (num_noted > 0) & (num_noted <= NOTES):
        slot = tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(notes + number * NOTES + slot, place.to(tl.int16), mask=reaches)


@triton.jit(do_not_specialize=["stride"])
def count(
    tensor_of, fields, first, second, turn, thresholds, notes, noted, state, found, stride,
    BLOCK: tl.constexpr, NOTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """How many noted elements of each chunk are larger than the k-th largest, and how many equal it."""
    tensor, row, chunk = part_of(tensor_of, fields, WIDTH)
    at_v = second
    if tl.load(turn) != 0:
        at_v = first
    least = tl.load(state + 4 * tensor)
    is_whole, place, here = noted_part(row, chunk, notes, noted, state, tensor, BLOCK, NOTES)
    num_larger = 0
    num_equal = 0
    if is_whole:
        threshold = tl.load(thresholds + tensor)
        is_all = tl.load(state + 4 * tensor + 3) != 0
        for block in range(65536 // BLOCK):
            place_b, x_b, here_b = block_of_chunk(row, at_v, chunk, block, threshold, is_all, BLOCK)
            num_larger += tl.sum((here_b & (bits_of(x_b) > least)).to(tl.int32))
            num_equal += tl.sum((here_b & (bits_of(x_b) == least)).to(tl.int32))
    else:
        at = at_v + (tl.load(row) + chunk.to(tl.int64) * 65536)
        size = bits_of(tl.load(at + place, mask=here, other=0.0))
        num_larger += tl.sum((here & (size > least)).to(tl.int32))
        num_equal += tl.sum((here & (size == least)).to(tl.int32))
    tl.store(found + tl.program_id(0), num_larger)
    tl.store(found + stride + tl.program_id(0), num_equal)


@triton.jit
def _emit_some(
    place, x, here, least, num_ties, ties, slot, at_v, at_u, offsets, row, CLEARS_MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Write those of these elements that are sent; returns how many were, and how many of all equal the least."""
    size = bits_of(x)
    is_equal = (here & (size == least)).to(tl.int32)
    rank = ties + tl.cumsum(is_equal, 0) - 1
    is_sent = here & ((size > least) | ((size == least) & (rank < num_ties)))
    to = slot + tl.cumsum(is_sent.to(tl.int32), 0) - 1
    tl.store(offsets + to, place.to(tl.int16), mask=is_sent)
    tl.store(row + to, x, mask=is_sent)
    tl.store(at_v + place, tl.zeros_like(x), mask=is_sent)
    if CLEARS_MOMENTUM:
        tl.store(at_u + place, tl.zeros_like(x), mask=is_sent)
    return tl.sum(is_sent.to(tl.int32)), tl.sum(is_equal)


@triton.jit(do_not_specialize=["stride"])
def emit(
    tensor_of, fields, first, second, turn, thresholds, notes, noted, state, first_u, second_u, before, stride,
    rooms, counts, offsets, entries,
    CLEARS_MOMENTUM: tl.constexpr, BLOCK: tl.constexpr, NOTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`before`: elements of all chunks before this one that are larger, and that are equal."""
    tensor, row, chunk = part_of(tensor_of, fields, WIDTH)
    number = tl.program_id(0)
    at_v = second
    at_u = second_u
    if tl.load(turn) != 0:
        at_v = first
        at_u = first_u
    start = tl.load(row) + chunk.to(tl.int64) * 65536
    at_u += start
    least = tl.load(state + 4 * tensor)
    num_ties = tl.load(state + 4 * tensor + 1)
    ties = tl.load(before + stride + number) - tl.load(before + stride + number - chunk)
    larger = tl.load(before + number) - tl.load(before + number - chunk)
    num_sent = 0
    slot = tl.load(rooms + 2 * tensor + 1) + larger + tl.minimum(ties, num_ties)
    is_whole, place, here = noted_part(row, chunk, notes, noted, state, tensor, BLOCK, NOTES)
    if is_whole:
        threshold = tl.load(thresholds + tensor)
        is_all = tl.load(state + 4 * tensor + 3) != 0
        for block in range(65536 // BLOCK):
            place_b, x_b, here_b = block_of_chunk(row, at_v, chunk, block, threshold, is_all, BLOCK)
            sent_b, equal_b = _emit_some(
                place_b, x_b, here_b, least, num_ties, ties, slot + num_sent, at_v + start, at_u, offsets, entries,
                CLEARS_MOMENTUM,
            )  # fmt: skip
            num_sent += sent_b
            ties += equal_b
    else:
        x = tl.load(at_v + start + place, mask=here, other=0.0)
        sent, equal = _emit_some(
            place, x, here, least, num_ties, ties, slot, at_v + start, at_u, offsets, entries, CLEARS_MOMENTUM
        )
        num_sent += sent
    tl.store(counts + number, num_sent)


@triton.jit(do_not_specialize=["counts_stride", "ends_stride", "offsets_stride", "rows_stride"])
def add(
    tensor_of, fields, first, second, turn, rooms, counts, counts_stride, ends, ends_stride, offsets, offsets_stride,
    rows, rows_stride, scale,
    CLEARS: tl.constexpr, IS_PACKED: tl.constexpr, IS_ALIGNED: tl.constexpr, NUM_ROWS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program has one chunk, and adds the entries of one row after those of another."""
    tensor, row, chunk = part_of(tensor_of, fields, WIDTH)
    number = tl.program_id(0)
    numel = tl.load(row + 1)
    start = chunk.to(tl.int64) * CHUNK
    target = second
    if tl.load(turn) != 0:
        target = first
    offset = tl.load(row + 3) if IS_PACKED else tl.load(row)
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 4)
        numel = tl.multiple_of(numel, 4)
        target = tl.multiple_of(target, 16)
    target += offset + start
    factor = tl.load(scale).to(tl.float32)
    first_slot = tl.load(rooms + 2 * tensor + 1)
    if CLEARS:
        for block in range(CHUNK // BLOCK):
            place = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(target + place, tl.zeros((BLOCK,), dtype=tl.float32), mask=start + place < numel)
        tl.debug_barrier()
    for which in range(NUM_ROWS):
        at_count = counts + which * counts_stride.to(tl.int64) + number
        at_end = ends + which * ends_stride.to(tl.int64) + number
        num_here = tl.load(at_count)
        before = tl.load(at_end - chunk) - tl.load(at_count - chunk)
        slot = first_slot + tl.load(at_end) - num_here - before
        done = 0
        while done < num_here:
            entry = slot + done + tl.arange(0, 1024)
            here = done + tl.arange(0, 1024) < num_here
            place = tl.load(offsets + which * offsets_stride.to(tl.int64) + entry, mask=here, other=0)
            place = place.to(tl.int32) & 0xFFFF
            value = tl.load(rows + which * rows_stride.to(tl.int64) + entry, mask=here, other=0.0)
            old = tl.load(target + place, mask=here, other=0.0)
            tl.store(target + place, old + value * factor, mask=here)
            done += 1024
        tl.debug_barrier()  # of one element, rows are added in their order
