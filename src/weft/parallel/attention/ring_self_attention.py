"""Ring self-attention (Li et al., 2021): keys rotate to make whole rows of scores, then values rotate.

The forerunner of ring attention, kept as a named variant. It needs no log-sum-exp and no merging, but keeps T × S
probabilities per head for the backward pass, so memory is still quadratic in the length of the sequence. Columns are in
the order of ring ranks, not of the sequence, which makes no difference to a sum.

In the backward pass keys and values rotate together, and their gradients behind them, as in `ring_exchange.py`.

Dims as in `ring.py`; S = ring · T, and R = H / G query heads look at each key head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.dtypes import accumulator_dtype
from weft.parallel.attention.kernels import Gradients, by_group, hide
from weft.parallel.attention.ring_exchange import Part, Ring, rotate, rotate_with_gradients
from weft.plan.partition.sequence import Rectangle


def self_attention_forward(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """(out_BHTE, probabilities_BHTS), in the dtype of the inputs."""
    wide, tokens, num_groups = accumulator_dtype(q_BHTD.dtype), ring.now.places.tokens_per_ring, k_BGTD.shape[1]
    q_BGRTD = by_group(q_BHTD, num_groups).to(wide)
    scores_BGRTS = q_BGRTD.new_full((*q_BGRTD.shape[:-1], tokens * ring.now.places.ring), -math.inf)
    for keys, k in rotate(k_BGTD.clone(memory_format=torch.contiguous_format), ring):
        for one in ring.rectangles(keys):
            found = q_BGRTD[..., slice(*one.q), :] @ k[:, :, None, slice(*one.k)].to(wide).mT
            hide(found.mul_(ring.scale), one.is_causal, ring.mask(keys, one, found.device))
            _block(scores_BGRTS, keys, one, tokens).copy_(found)
    probabilities = scores_BGRTS.softmax(-1)
    if ring.may_see_nothing:  # a row of nothing but -inf
        probabilities.nan_to_num_(nan=0.0)
    del scores_BGRTS
    out = q_BGRTD.new_zeros((*q_BGRTD.shape[:-1], v_BGTE.shape[-1]))
    for keys, v in rotate(v_BGTE.clone(memory_format=torch.contiguous_format), ring):
        for one in ring.rectangles(keys):
            shares = _block(probabilities, keys, one, tokens)
            out[..., slice(*one.q), :] += shares @ v[:, :, None, slice(*one.k)].to(wide)
    return out.flatten(1, 2).to(q_BHTD.dtype), probabilities.flatten(1, 2).to(q_BHTD.dtype)


def self_attention_backward(
    grad_BHTE: Tensor, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, out_BHTE: Tensor, p_BHTS: Tensor, ring: Ring
) -> Gradients:
    """(dq, dk, dv), in the dtype of the inputs. Masked pairs have probability p = 0, so masks are not needed again."""
    wide, tokens, num_groups = accumulator_dtype(q_BHTD.dtype), ring.now.places.tokens_per_ring, k_BGTD.shape[1]
    q, grad, out = (by_group(one, num_groups).to(wide) for one in (q_BHTD, grad_BHTE, out_BHTE))
    probabilities = by_group(p_BHTS, num_groups)
    delta = (grad * out).sum(-1, keepdim=True)
    dq = torch.zeros_like(q)

    def find_parts(keys: int, k: Tensor, v: Tensor) -> list[Part]:
        parts = []
        for one in ring.rectangles(keys):
            rows, columns = slice(*one.q), slice(*one.k)
            shares = _block(probabilities, keys, one, tokens).to(wide)
            of_shares = grad[..., rows, :] @ v[:, :, None, columns].to(wide).mT
            of_scores = shares * of_shares.sub_(delta[..., rows, :]).mul_(ring.scale)
            dq[..., rows, :] += of_scores @ k[:, :, None, columns].to(wide)
            of_k, of_v = (of_scores.mT @ q[..., rows, :]).sum(2), (shares.mT @ grad[..., rows, :]).sum(2)
            parts.append((one.k[0], of_k, of_v))
        return parts

    dk, dv = rotate_with_gradients(k_BGTD, v_BGTE, ring, find_parts)
    return dq.flatten(1, 2).to(q_BHTD.dtype), dk.to(k_BGTD.dtype), dv.to(v_BGTE.dtype)


def _block(scores_BGRTS: Tensor, keys: int, one: Rectangle, tokens: int) -> Tensor:
    """The entries of whole rows that belong to a rectangle."""
    first = keys * tokens
    return scores_BGRTS[..., slice(*one.q), first + one.k[0] : first + one.k[1]]
