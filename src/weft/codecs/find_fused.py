"""Finds the codecs in Triton kernels, where they work."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from weft.codecs.base import Bucket, Codec

log = logging.getLogger("weft")

_MOST_COLUMNS = 2**27
"""Of a matrix: kernels count places within up to eight rows in 32 bits."""


def find_fused(bucket: Bucket) -> Callable[[Bucket], Codec] | None:
    """What makes the fused codec of a bucket; None where torch's functions serve it."""
    if bucket.device.type != "cuda" or bucket.dtype != torch.float32 or not bucket.tensors:
        return None
    if any(one.num_columns > _MOST_COLUMNS for one in bucket.tensors):
        return None
    return _codecs().get(bucket.codec.name)


@functools.cache
def _codecs() -> dict[str, Callable[[Bucket], Codec]]:
    try:
        from weft.codecs.fused import FUSED
        from weft.codecs.triton_kernels.signs import try_kernels

        try_kernels()
    except Exception as error:
        log.info("codecs use torch's functions, without Triton (%r)", error)
        return {}
    return FUSED
