"""How compression sets in over the first steps: the share of entries that is sent, or all values as they are.

Early gradients change fast, and what is held back of them does harm later. Sparse codecs send more at first, and a
quarter as much in every further stage of equal length, as DGC published (25 %, 6.25 %, 1.56 %, 0.4 %, 0.1 %); others
send everything until the warm-up is over.
"""

from __future__ import annotations

import math

from weft.plan.plan import Codec

SPARSE = ("topk", "dgc")
_STAGE_FACTOR = 0.25


def is_dense(codec: Codec, step: int) -> bool:
    """True if values travel as they are in this step, counted from 0."""
    return codec.name == "none" or (codec.name not in SPARSE and step < codec.warmup_steps)


def density(codec: Codec, step: int) -> float:
    """Share of the entries that topk and dgc send in this step, counted from 0."""
    if step >= codec.warmup_steps or codec.density >= 1:
        return codec.density
    num_stages = max(1, math.ceil(math.log(codec.density) / math.log(_STAGE_FACTOR) - 1e-9) - 1)
    stage = step * num_stages // codec.warmup_steps
    return max(codec.density, _STAGE_FACTOR ** (stage + 1))
