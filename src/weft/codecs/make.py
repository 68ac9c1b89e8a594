"""Makes the codec that a plan names, one per bucket: on a GPU in fused Triton kernels, where these work."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from weft.codecs.base import Bucket, Codec
from weft.codecs.dgc import Dgc
from weft.codecs.half import Half
from weft.codecs.onebit import make_onebit
from weft.codecs.powersgd import PowerSgd
from weft.codecs.random_rounding import Qsgd, TernGrad
from weft.codecs.sign import Sign
from weft.codecs.topk import TopK

log = logging.getLogger("weft")

_MOST_COLUMNS = 2**27
"""Of a matrix: kernels count places within up to eight rows in 32 bits."""

_CODECS: dict[str, Callable[[Bucket], Codec]] = {
    "half": Half,
    "topk": TopK,
    "dgc": Dgc,
    "onebit": make_onebit,
    "sign": Sign,
    "qsgd": Qsgd,
    "terngrad": TernGrad,
    "powersgd": PowerSgd,
}


def make_codec(bucket: Bucket) -> Codec:
    """The codec of a bucket, as its plan names it."""
    make = find_fused(bucket) or _CODECS[bucket.codec.name]
    return make(bucket)


def find_fused(bucket: Bucket) -> Callable[[Bucket], Codec] | None:
    """What makes the codec of a bucket in Triton kernels; None where torch's operations serve it."""
    if bucket.device.type != "cuda" or bucket.dtype != torch.float32 or not bucket.tensors:
        return None
    if any(one.num_columns > _MOST_COLUMNS for one in bucket.tensors):
        return None
    return _fused_codecs().get(bucket.codec.name)


@functools.cache
def _fused_codecs() -> dict[str, Callable[[Bucket], Codec]]:
    try:
        from weft.codecs.fused import FUSED
        from weft.codecs.triton_kernels.signs import try_kernels

        try_kernels()
    except Exception as error:  # no Triton, or one that cannot compile here
        log.info("codecs use torch's operations, without Triton (%r)", error)
        return {}
    return FUSED
