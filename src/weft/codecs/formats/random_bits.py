"""Random numbers of codecs: a function of the tensor's name, the step, the replica and the element, of nothing else.

No generator has a state that would have to be saved, kept in step between ranks, or drawn from in one order: ranks that
hold copies of a tensor draw alike, replicas differ, a resumed run draws what the unbroken one would have, and every
kernel computes the number of its element by itself. Torch here, C and Triton kernels give the same bits:

    scramble(x):  x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15;  x *= 0x735A2D97;  x ^= x >> 15     (mod 2^32)
    key           k = crc32(name);  k = scramble(k ^ scramble(step + G));  k = scramble(k ^ scramble(replica + G))
    bits(i)       x = i ^ key;  x ^= x >> 16;  x *= 0x21F0AAAD;  x += second;
                  x ^= x >> 15;  x *= 0x735A2D97;  x ^= x >> 15,       with second = key * G mod 2^32, G = 0x9E3779B9
    r(i)          (bits(i) >> 8) / 2^24, at least 0 and less than 1, exact in float32

The key enters twice, or else the numbers of one key would be those of another in another order. Both factors are below
2^31, so that products of 32 bits fit into torch's int64.
"""

from __future__ import annotations

import zlib

import torch

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_FIRST_FACTOR = 0x21F0AAAD
_SECOND_FACTOR = 0x735A2D97


def key_of(name: str, step: int, replica: int = 0) -> int:
    """The key, 32 bits, of a tensor's random numbers in a step on a replica; step and replica count from 0."""
    key = zlib.crc32(name.encode())
    for word in (step, replica):
        key = _scramble(key ^ _scramble((word + _GOLDEN) & _MASK))
    return key


def second_key(key: int) -> int:
    """What kernels add between the two products."""
    return key * _GOLDEN & _MASK


def random_bits(key: int, numel: int, device: torch.device) -> torch.Tensor:
    """32 random bits of each element, counted from 0, as int64 values."""
    x = torch.arange(numel, dtype=torch.int64, device=device).bitwise_and_(_MASK).bitwise_xor_(key)
    x ^= x >> 16
    x.mul_(_FIRST_FACTOR).add_(second_key(key)).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(_SECOND_FACTOR).bitwise_and_(_MASK)
    x ^= x >> 15
    return x


def uniforms(key: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """r of each element: uniform in [0, 1), multiples of 2^-24."""
    return random_bits(key, numel, device).bitwise_right_shift_(8).to(dtype).mul_(2.0**-24)


def normals(key: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Nearly normal numbers of mean 0 and variance 1: each the sum of its four bytes, so exactly alike on all devices,
    as no logarithm or cosine would be."""
    bits = random_bits(key, numel, device)
    total = (bits & 0xFF) + (bits >> 8 & 0xFF) + (bits >> 16 & 0xFF) + (bits >> 24)
    return (total - 510).to(dtype).mul_((4 * (256**2 - 1) / 12) ** -0.5)


def _scramble(x: int) -> int:
    x ^= x >> 16
    x = x * _FIRST_FACTOR & _MASK
    x ^= x >> 15
    x = x * _SECOND_FACTOR & _MASK
    return x ^ x >> 15
