"""Makes the codec that a plan names, one per bucket."""

from __future__ import annotations

from weft.codecs.base import Codec
from weft.codecs.half import Half
from weft.plan.plan import Plan


def make_codec(plan: Plan, numel: int) -> Codec | None:
    """The codec of a bucket of so many values; None: the values travel as they are."""
    match plan.codec.name:
        case "none":
            return None
        case "half":
            return Half(numel)
    raise NotImplementedError(f'[codec] name = "{plan.codec.name}"')  # `plan/check.py` has refused it
