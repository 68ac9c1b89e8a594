"""Ring attention: queries stay, blocks of keys and values rotate, and each block's output is merged as it comes.

A rank keeps the output of its queries over the keys seen so far, with its log-sum-exp. Merging it with that of a
further block is exact, so no rank ever holds more than its own and one visiting block, and no row of scores. Merged
outputs and sums of gradients are float32 where inputs have 16 bits.

`ring_exchange.py` moves the blocks. A block of which a rank may see nothing is passed on without computation.

Dims as in `kernels.py`; T is the number of tokens of one ring rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from weft.dtypes import accumulator_dtype
from weft.parallel.attention.kernels import Gradients, attend_block, attend_block_backward, lay_out
from weft.parallel.attention.masks import Pass
from weft.parallel.attention.merge import Merged
from weft.parallel.attention.ring_exchange import Pair, Part, Rotation, rotate, rotate_with_gradients
from weft.plan.partition.sequence import rectangles


def ring_forward(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, rotation: Rotation, now: Pass, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_BHTE in the dtype of the inputs, lse_BHT)."""
    merged = Merged(is_masked=now.is_masked)
    for keys, k, v in _blocks(k_BGTD, v_BGTE, rotation):
        for one in rectangles(now.places, rotation.index, keys, is_causal=is_causal):
            out, lse = attend_block(
                q_BHTD[:, :, slice(*one.q)],
                k[:, :, slice(*one.k)],
                v[:, :, slice(*one.k)],
                is_causal=one.is_causal,
                scale=scale,
                mask=now.mask(rotation.index, keys, one),
            )
            merged.add(out, lse, one.q)
    return merged.out.to(q_BHTD.dtype), merged.lse


def ring_backward(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    out_BHTE: Tensor,
    lse_BHT: Tensor,
    *,
    rotation: Rotation,
    now: Pass,
    is_causal: bool,
    scale: float,
) -> Gradients:
    """(dq, dk, dv), in the dtype of the inputs; `out` and `lse` are those of `ring_forward`."""
    dq: Tensor | None = None
    grad_BHTE, out_BHTE = lay_out(grad_BHTE), lay_out(out_BHTE)

    def find_parts(keys: int, k: Tensor, v: Tensor) -> list[Part]:
        nonlocal dq
        parts = []
        for one in rectangles(now.places, rotation.index, keys, is_causal=is_causal):
            of_queries, of_keys = slice(*one.q), slice(*one.k)
            block_dq, *part = attend_block_backward(
                grad_BHTE[:, :, of_queries],
                q_BHTD[:, :, of_queries],
                k[:, :, of_keys],
                v[:, :, of_keys],
                out_BHTE[:, :, of_queries],
                lse_BHT[:, :, of_queries],
                is_causal=one.is_causal,
                scale=scale,
                mask=now.mask(rotation.index, keys, one),
            )
            if dq is None:  # every query sees the first block
                dq = block_dq
            else:
                dq = dq.to(accumulator_dtype(dq.dtype))
                dq[:, :, of_queries] += block_dq
            parts.append((part[0], part[1]))
        return parts

    if rotation.size == 1:
        ((dk, dv),) = find_parts(0, k_BGTD, v_BGTE)
        padding = k_BGTD.shape[2] - dk.shape[2]  # which has no gradient
        dk, dv = (F.pad(one, (0, 0, 0, padding)) if padding else one for one in (dk, dv))
    else:
        dk, dv = rotate_with_gradients(k_BGTD, v_BGTE, rotation, find_parts)
    assert dq is not None
    return dq.to(q_BHTD.dtype), dk.to(k_BGTD.dtype), dv.to(v_BGTE.dtype)


def _blocks(k_BGTD: Tensor, v_BGTE: Tensor, rotation: Rotation) -> Iterator[tuple[int, Tensor, Tensor]]:
    if rotation.size == 1:
        yield 0, k_BGTD, v_BGTE
        return
    pair = Pair(k_shape=k_BGTD.shape, v_shape=v_BGTE.shape)
    for owner, block in rotate(pair.pack(k_BGTD, v_BGTE, rotation), rotation):
        yield owner, *pair.unpack(block)
