"""Ring attention: queries stay, blocks of keys and values rotate, and each block's output is merged as it comes.

A rank keeps the output of its queries over the keys seen so far, with its log-sum-exp. Merging it with that of a
further block is exact, so no rank ever holds more than its own and one visiting block, and no row of scores. Merged
outputs and sums of gradients are float32 where inputs have 16 bits.

`ring_exchange.py` moves the blocks. A block of which a rank may see nothing, because it comes later or lies outside of
the window, is passed on without computation.

Dims as in `kernels.py`; T is the number of tokens of one ring rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.dtypes import accumulator_dtype
from weft.parallel.attention.kernels import Gradients, attend_block, attend_block_backward, lay_out
from weft.parallel.attention.merge import Merged
from weft.parallel.attention.ring_exchange import Pair, Part, Ring, rotate, rotate_with_gradients


def ring_forward(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """(out_BHTE in the dtype of the inputs, lse_BHT)."""
    merged = Merged(num_queries=q_BHTD.shape[2], is_masked=ring.may_see_nothing)
    for keys, k, v in _blocks(k_BGTD, v_BGTE, ring):
        for one in ring.rectangles(keys):
            tensors = (q_BHTD[:, :, slice(*one.q)], k[:, :, slice(*one.k)], v[:, :, slice(*one.k)])
            mask = ring.mask(keys, one, q_BHTD.device)
            out, lse = attend_block(
                *tensors, is_causal=one.is_causal, scale=ring.scale, mask=mask, softcap=ring.softcap
            )
            merged.add(out, lse, one.q)
    return merged.finish(q_BHTD, width=v_BGTE.shape[3])


def ring_backward(
    grad_BHTE: Tensor, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, out_BHTE: Tensor, lse_BHT: Tensor, ring: Ring
) -> Gradients:
    """(dq, dk, dv), in the dtype of the inputs; `out` and `lse` are those of `ring_forward`."""
    dq: Tensor | None = None
    grad_BHTE, out_BHTE = lay_out(grad_BHTE), lay_out(out_BHTE)

    def find_parts(keys: int, k: Tensor, v: Tensor) -> list[Part]:
        nonlocal dq
        parts = []
        for one in ring.rectangles(keys):
            rows = slice(*one.q)
            grad, q, out, lse = (of_queries[:, :, rows] for of_queries in (grad_BHTE, q_BHTD, out_BHTE, lse_BHT))
            tensors = (grad, q, k[:, :, slice(*one.k)], v[:, :, slice(*one.k)], out, lse)
            mask = ring.mask(keys, one, q.device)
            block_dq, *part = attend_block_backward(
                *tensors, is_causal=one.is_causal, scale=ring.scale, mask=mask, softcap=ring.softcap
            )
            if dq is None and block_dq.shape == q_BHTD.shape:
                dq = block_dq
            else:
                wide = accumulator_dtype(block_dq.dtype)
                dq = torch.zeros_like(q_BHTD, dtype=wide) if dq is None else dq.to(wide)
                dq[:, :, rows] += block_dq
            parts.append((one.k[0], part[0], part[1]))
        return parts

    if ring.size > 1:
        dk, dv = rotate_with_gradients(k_BGTD, v_BGTE, ring, find_parts)
    else:
        parts = find_parts(0, k_BGTD, v_BGTE)
        if len(parts) == 1 and parts[0][0] == 0:
            _, dk, dv = parts[0]
            padding = k_BGTD.shape[2] - dk.shape[2]  # which has no gradient
            dk, dv = (F.pad(one, (0, 0, 0, padding)) if padding else one for one in (dk, dv))
        else:
            pair = Pair(k_shape=k_BGTD.shape, v_shape=v_BGTE.shape)
            dk, dv = pair.unpack(pair.total(parts, k_BGTD.new_empty(k_BGTD.numel() + v_BGTE.numel())))
    if dq is None:  # nothing but padding, out of sight of every token
        dq = torch.zeros_like(q_BHTD)
    return dq.to(q_BHTD.dtype), dk.to(k_BGTD.dtype), dv.to(v_BGTE.dtype)


def _blocks(k_BGTD: Tensor, v_BGTE: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    if ring.size == 1:
        yield 0, k_BGTD, v_BGTE
        return
    pair = Pair(k_shape=k_BGTD.shape, v_shape=v_BGTE.shape)
    for owner, block in rotate(pair.pack(k_BGTD, v_BGTE, ring), ring):
        yield owner, *pair.unpack(block)
