"""Makes the codec that a plan names, one per bucket."""

from __future__ import annotations

from collections.abc import Callable

from weft.codecs.base import Codec
from weft.codecs.half import Half
from weft.plan.plan import Plan

_CODECS: dict[str, Callable[[int], Codec]] = {"half": Half}
"""The codecs that are built; `plan/check.py` refuses the others."""


def make_codec(plan: Plan, numel: int) -> Codec | None:
    """The codec of a bucket of so many values; None: the values travel as they are."""
    return None if plan.codec.name == "none" else _CODECS[plan.codec.name](numel)
