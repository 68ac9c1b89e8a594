"""The random numbers of codecs, computed a second time: a function of name, step, replica and element.

scrambled(x)  x ^= x >> 16;  x *= 0x21F0AAAD;  x += added;  x ^= x >> 15;  x *= 0x735A2D97;  x ^= x >> 15   (mod 2^32)
key           k = crc32(name);  k = scrambled(k ^ scrambled(step + G));  k = scrambled(k ^ scrambled(replica + G))
word of i     scrambled(i ^ key), with added = key G
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_GOLDEN = np.uint32(0x9E3779B9)
"""G above."""


def random_key(name: str, step: int, replica: int) -> int:
    """The 32 bits from which all random numbers of a tensor in a step on a replica are made."""
    key = np.array([zlib.crc32(name.encode())], dtype=np.uint32)
    for word in (step, replica):
        key = _scrambled(key ^ _scrambled(np.array([word], dtype=np.uint32) + _GOLDEN))
    return int(key[0])


def random_words(name: str, step: int, replica: int, numel: int) -> Words:
    """32 random bits of each element."""
    key = np.array([random_key(name, step, replica)], dtype=np.uint32)
    return _scrambled(np.arange(numel, dtype=np.uint32) ^ key, added=key * _GOLDEN)


def _scrambled(words: Words, *, added: Words | None = None) -> Words:
    """Every bit of a word changes about half of the others; unsigned arrays wrap at 2^32."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    if added is not None:
        words = words + added
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x735A2D97)
    return words ^ (words >> np.uint32(15))
