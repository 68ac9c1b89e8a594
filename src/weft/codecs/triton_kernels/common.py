"""What several kernels of codecs share: packing, random numbers, flags; needs Triton.

Sizes that differ from bucket to bucket are not specialised on, or every bucket would wait for its own compilation.
Kernels are compiled without fused multiply-adds, with exact quotients and roots, so that they round as torch does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.plan.exchange.gpu_scratch import NOTED_BLOCK

BLOCK = NOTED_BLOCK
"""Elements of a program that goes through a tensor in one piece."""
NUM_WARPS = 8


def num_blocks(numel: int, block: int = BLOCK) -> int:
    return -(-numel // block)


@triton.jit
def part_of(tensor_of, fields, WIDTH: tl.constexpr):
    """(number of the tensor, its fields, which of its parts) of this program."""
    number = tl.program_id(0)
    tensor = tl.load(tensor_of + number)
    row = fields + tensor * WIDTH
    return tensor, row + 1, number - tl.load(row)


@triton.jit
def block_of(row, block, BLOCK: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """(place of a tensor's block in the values, its first element in the tensor, how many it has). Places within a
    block take 32 bits: half the instructions and registers of 64."""
    offset = tl.load(row)
    start = block.to(tl.int64) * BLOCK
    count = tl.minimum(tl.load(row + 1) - start, BLOCK).to(tl.int32)
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 8)
        count = tl.multiple_of(count, 8)
    return offset + start, start, count


@triton.jit
def flag_not_finite(x, not_finite):
    """Masked elements must be given as 0."""
    num_bad = tl.sum((~(tl.abs(x) < float("inf"))).to(tl.int32))
    if num_bad > 0:
        tl.atomic_add(not_finite, 1.0)


@triton.jit
def packed(codes, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Bytes of codes of so many bits, the first in the low bits; int32."""
    per_byte: tl.constexpr = 8 // BITS
    if per_byte == 1:
        return codes
    groups = tl.reshape(codes, (BLOCK // per_byte, per_byte))
    return tl.sum(groups << (BITS * tl.arange(0, per_byte))[None, :], axis=1)


@triton.jit
def unpacked(message, entry, here, BITS: tl.constexpr):
    """The codes of elements, int32, of bytes that begin at `message`."""
    per_byte: tl.constexpr = 8 // BITS
    byte = tl.load(message + entry // per_byte, mask=here, other=0).to(tl.int32)
    if per_byte == 1:
        return byte
    return (byte >> (BITS * (entry % per_byte)).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def scramble(x):
    x ^= x >> 16
    x = x * 0x21F0AAAD
    x ^= x >> 15
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def key_of(crc, step, replica):
    """As `random_bits.key_of`, of the CRC of the name; uint32."""
    key = crc.to(tl.uint32)
    key = scramble(key ^ scramble(step.to(tl.uint32) + 0x9E3779B9))
    return scramble(key ^ scramble(replica.to(tl.uint32) + 0x9E3779B9))


@triton.jit
def uniforms(key, entry):
    """As `random_bits.uniforms`, of elements by their places."""
    x = entry.to(tl.uint32) ^ key
    x ^= x >> 16
    x = x * 0x21F0AAAD + key * 0x9E3779B9
    x ^= x >> 15
    x = x * 0x735A2D97
    x ^= x >> 15
    return (x >> 8).to(tl.float32) * (2.0**-24)
