"""Makes the codec that a plan names, one per bucket."""

from __future__ import annotations

from collections.abc import Callable

from weft.codecs.base import Bucket, Codec
from weft.codecs.dgc import Dgc
from weft.codecs.half import Half
from weft.codecs.topk import TopK

_CODECS: dict[str, Callable[[Bucket], Codec]] = {"half": Half, "topk": TopK, "dgc": Dgc}
"""The codecs that are built; `plan/check.py` refuses the others."""


def make_codec(bucket: Bucket) -> Codec:
    """The codec of a bucket, as its plan names it."""
    return _CODECS[bucket.codec.name](bucket)
