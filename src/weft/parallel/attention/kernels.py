"""Attention of some queries to one block of keys: the output with its log-sum-exp, and the gradients given both.

With the log-sum-exp, outputs of several blocks can be merged into that of all keys; and the gradients that a block
adds are exact when `out` and `lse` are those of *all* keys. Sequence parallelism is built on these two facts, and
torch's `scaled_dot_product_attention` gives nobody its log-sum-exp, so the kernels beneath it are called here:

    CPU                                  flash for CPU
    CUDA, 16 bits, no mask, head <= 256  flash
    CUDA, other than float64             memory-efficient; it has no groups of heads, so keys are repeated for it
    all else                             matrix products; they hold a whole block of scores

A query that sees no key has output 0, log-sum-exp -inf and no gradients. There is no dropout.

Dims: B samples, H query heads, G key heads (H is a multiple), T queries, S keys, D and E entries of a key and a value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]

_LARGEST_FLASH_HEAD = 256
_LSE_MULTIPLE = 32
_BIAS_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to compute a block. Both functions end with: allowed pairs or None, is_causal, scale."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    multiple: int = 1
    """Heads are padded with zeros to a multiple of this many entries."""
    has_one_width: bool = True
    """Keys and values must have heads of one width."""

    def pad(self, *tensors: Tensor) -> list[Tensor]:
        widths = [one.shape[-1] for one in tensors]
        if self.has_one_width:
            widths = [max(widths)] * len(widths)
        widths = [-(-width // self.multiple) * self.multiple for width in widths]
        return [self._pad(one, width) for one, width in zip(tensors, widths, strict=True)]

    def _pad(self, heads_BHTX: Tensor, width: int) -> Tensor:
        if heads_BHTX.shape[-1] < width:
            return F.pad(heads_BHTX, (0, width - heads_BHTX.shape[-1]))
        # GPUs read several entries at once, and stop with an error if they do not begin at such a place.
        places = (heads_BHTX.storage_offset(), *heads_BHTX.stride()[:-1])
        return heads_BHTX.contiguous() if any(place % self.multiple for place in places) else heads_BHTX


def attend_block(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, *, is_causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out_BHTE, lse_BHT); the latter is float32, or float64 with such inputs.

    `mask`: bool, broadcastable to [B, 1, T, S], True where a query may look. `is_causal` is for T = S only.
    """
    allowed = _allowed(mask, q_BHTD.shape[2], is_causal)
    kernel = choose_kernel(q_BHTD, v_BGSE, has_mask=mask is not None)
    q, k, v = kernel.pad(q_BHTD, k_BGSD, v_BGSE)
    out, lse = kernel.forward(q, k, v, allowed, is_causal and allowed is None, scale)
    out = out[..., : v_BGSE.shape[-1]]
    if allowed is None:
        return out, lse
    sees_nothing = ~allowed.any(-1)
    return out.masked_fill(sees_nothing[..., None], 0.0), lse.masked_fill(sees_nothing, -math.inf)


def attend_block_backward(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    out_BHTE: Tensor,
    lse_BHT: Tensor,
    *,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> Gradients:
    """(dq, dk, dv) that this block adds, where `out` and `lse` are those of all keys."""
    allowed = _allowed(mask, q_BHTD.shape[2], is_causal)
    if allowed is not None:  # of a score less infinity, exp is 0; less -infinity, it would be infinite
        lse_BHT = lse_BHT.masked_fill(lse_BHT == -math.inf, math.inf)
    kernel = choose_kernel(q_BHTD, v_BGSE, has_mask=mask is not None)
    q, k, v, grad, out = kernel.pad(q_BHTD, k_BGSD, v_BGSE, grad_BHTE, out_BHTE)
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse_BHT, allowed, is_causal and allowed is None, scale)
    width = q_BHTD.shape[-1]
    return dq[..., :width], dk[..., :width], dv[..., : v_BGSE.shape[-1]]


def choose_kernel(q: Tensor, v: Tensor, *, has_mask: bool) -> Kernel:
    if q.device.type == "cpu":
        return CPU
    if q.device.type != "cuda" or q.dtype == torch.float64:
        return PRODUCTS
    is_short = max(q.shape[-1], v.shape[-1]) <= _LARGEST_FLASH_HEAD and q.dtype != torch.float32
    return FLASH if is_short and not has_mask and _can_flash(q.device) else EFFICIENT


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype parts of something are added up."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def lay_out(heads_BHTX: Tensor) -> Tensor:
    """[B, T, H, X] in memory, if its device's kernels make such a copy at every call of what is not."""
    return heads_BHTX.transpose(1, 2).contiguous().transpose(1, 2) if heads_BHTX.is_cuda else heads_BHTX


def by_group(heads_BHTX: Tensor, num_groups: int) -> Tensor:
    """[B, G, H / G, T, X]: query heads beside the key head they look at."""
    grouped: Tensor = heads_BHTX.unflatten(1, (num_groups, -1))
    return grouped


@functools.cache
def _can_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _allowed(mask: Tensor | None, num_queries: int, is_causal: bool) -> Tensor | None:
    """The mask with causality in it, for kernels that take one or the other."""
    if mask is None or not is_causal:
        return mask
    return mask & mask.new_ones(num_queries, num_queries).tril()


def _bias(allowed: Tensor | None, dtype: torch.dtype, multiple: int = 1) -> Tensor | None:
    """What kernels add to scores. Not -inf: a row of nothing else would be NaN in some of them."""
    if allowed is None:
        return None
    length = allowed.shape[-1]
    padded = allowed.new_zeros((*allowed.shape[:-1], -(-length // multiple) * multiple), dtype=dtype)
    return padded[..., :length].masked_fill_(~allowed, torch.finfo(dtype).min / 2)


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    bias = _bias(allowed, q.dtype)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out, lse


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Gradients:
    bias = _bias(allowed, q.dtype)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return dq, dk, dv


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, allowed: None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    allowed: None,
    is_causal: bool,
    scale: float,
) -> Gradients:
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        is_causal,
        seed,
        seed.new_empty(()),
        scale=scale,
    )
    return dq, dk, dv


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    bias = _expanded_bias(allowed, q, k)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeated(k, q), _repeated(v, q), bias, True, 0.0, is_causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Gradients:
    bias = _expanded_bias(allowed, q, k)
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    whole_lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=math.inf)
    out = lay_out(out)  # its strides are not looked at
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        _repeated(k, q),
        _repeated(v, q),
        bias,
        out,
        whole_lse,
        seed,
        seed,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    num_groups = k.shape[1]
    if num_groups < q.shape[1]:
        dk, dv = by_group(dk, num_groups).sum(2), by_group(dv, num_groups).sum(2)
    return dq, dk, dv


def _repeated(k_BGSD: Tensor, q_BHTD: Tensor) -> Tensor:
    """Keys once for every query head."""
    repeats = q_BHTD.shape[1] // k_BGSD.shape[1]
    return k_BGSD if repeats == 1 else k_BGSD.repeat_interleave(repeats, 1)


def _expanded_bias(allowed: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    bias = _bias(allowed, q.dtype, _BIAS_MULTIPLE)
    return None if bias is None else bias.expand(*q.shape[:3], k.shape[2])


def _products_forward(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, allowed, is_causal, scale)
    lse = scores.logsumexp(-1)
    probabilities = scores.sub_(lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp_()
    out = probabilities @ v.unsqueeze(2).to(scores.dtype)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _products_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Gradients:
    num_groups = k.shape[1]
    wide = accumulator_dtype(q.dtype)
    probabilities = _scores(q, k, allowed, is_causal, scale)
    probabilities.sub_(by_group(lse, num_groups).to(wide).unsqueeze(-1)).exp_()
    grad, out, q = (by_group(one, num_groups).to(wide) for one in (grad, out, q))
    dv = (probabilities.mT @ grad).sum(2)
    of_probabilities = grad @ v.unsqueeze(2).to(wide).mT
    of_scores = probabilities.mul_(of_probabilities.sub_((grad * out).sum(-1, keepdim=True))).mul_(scale)
    dq, dk = of_scores @ k.unsqueeze(2).to(wide), (of_scores.mT @ q).sum(2)
    return dq.flatten(1, 2).to(k.dtype), dk.to(k.dtype), dv.to(k.dtype)


def _scores(q: Tensor, k: Tensor, allowed: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """[B, G, H / G, T, S], -inf where a query may not look."""
    wide = accumulator_dtype(q.dtype)
    scores = (by_group(q, k.shape[1]).to(wide) @ k.unsqueeze(2).to(wide).mT).mul_(scale)
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores if allowed is None else scores.masked_fill_(~allowed.unsqueeze(1), -math.inf)


CPU = Kernel(forward=_cpu_forward, backward=_cpu_backward)
FLASH = Kernel(forward=_flash_forward, backward=_flash_backward, multiple=8)
EFFICIENT = Kernel(forward=_efficient_forward, backward=_efficient_backward, multiple=8, has_one_width=False)
PRODUCTS = Kernel(forward=_products_forward, backward=_products_backward, has_one_width=False)
