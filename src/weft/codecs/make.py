"""Makes the codec that a plan names, one per bucket."""

from __future__ import annotations

from collections.abc import Callable

from weft.codecs.base import Bucket, Codec
from weft.codecs.dgc import Dgc
from weft.codecs.find_fused import find_fused
from weft.codecs.half import Half
from weft.codecs.onebit import make_onebit
from weft.codecs.powersgd import PowerSgd
from weft.codecs.random_rounding import Qsgd, TernGrad
from weft.codecs.sign import Sign
from weft.codecs.topk import TopK

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
