"""Attention of some queries to one block of keys: the output with its log-sum-exp, and the gradients given both.

With their log-sum-exps, outputs of several blocks merge into the output over all keys; and the gradients that a block
adds are exact when `out` and `lse` are those of *all* keys. Sequence parallelism needs both, and torch's
`scaled_dot_product_attention` does not return its log-sum-exp, so the kernels beneath it are called here:

    CPU                                  flash for CPU
    CUDA, 16 bits, no mask, head <= 256  flash
    CUDA, other than float64             memory-efficient; it has no grouped heads, so keys are repeated for it
    all else, and any soft cap           matrix products, which hold a whole block of scores

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

from weft.dtypes import accumulator_dtype

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]

_LARGEST_FLASH_HEAD = 256
_LSE_MULTIPLE = 32
_BIAS_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries and the keys and values they attend to, padded for a kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor | None
    """bool, broadcastable to [B, 1, T, S]: which queries may see which keys, causality included."""
    is_causal: bool
    """Only without `allowed`."""
    scale: float
    softcap: float | None
    """Scores s are softcap · tanh(s / softcap), which only matrix products can compute."""

    def bias(self, multiple: int = 1) -> Tensor | None:
        """The term that kernels add to scores. Not -inf: a row of nothing else would be NaN in some of them."""
        if self.allowed is None:
            return None
        dtype, length = self.q.dtype, self.allowed.shape[-1]
        padded = self.allowed.new_zeros((*self.allowed.shape[:-1], -(-length // multiple) * multiple), dtype=dtype)
        return padded[..., :length].masked_fill_(~self.allowed, torch.finfo(dtype).min / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to compute a block."""

    forward: Callable[[Block], tuple[Tensor, Tensor]]
    """block -> (out, lse)."""
    backward: Callable[[Block, Tensor, Tensor, Tensor], Gradients]
    """(block, gradient of out, out, lse) -> (dq, dk, dv)."""
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
        # GPUs read several entries at once, and stop with an error if the first of them is not aligned.
        places = (heads_BHTX.storage_offset(), *heads_BHTX.stride()[:-1])
        return heads_BHTX.contiguous() if any(place % self.multiple for place in places) else heads_BHTX


def attend_block(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    *,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out_BHTE, lse_BHT); the latter is float32, or float64 for inputs in float64.

    `mask`: bool, broadcastable to [B, 1, T, S], True where a query may attend. `is_causal` is for T = S only.
    """
    kernel = PRODUCTS if softcap is not None else choose_kernel(q_BHTD, v_BGSE, has_mask=mask is not None)
    q, k, v = kernel.pad(q_BHTD, k_BGSD, v_BGSE)
    block = _make_block(q, k, v, is_causal, scale, mask, softcap)
    out, lse = kernel.forward(block)
    out = out[..., : v_BGSE.shape[-1]]
    if block.allowed is None:
        return out, lse
    sees_nothing = ~block.allowed.any(-1)
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
    softcap: float | None = None,
) -> Gradients:
    """(dq, dk, dv) that this block adds, where `out` and `lse` are those of all keys."""
    if mask is not None:  # exp(score - inf) is 0, exp(score + inf) would be infinite
        lse_BHT = lse_BHT.masked_fill(lse_BHT == -math.inf, math.inf)
    kernel = PRODUCTS if softcap is not None else choose_kernel(q_BHTD, v_BGSE, has_mask=mask is not None)
    q, k, v, grad, out = kernel.pad(q_BHTD, k_BGSD, v_BGSE, grad_BHTE, out_BHTE)
    dq, dk, dv = kernel.backward(_make_block(q, k, v, is_causal, scale, mask, softcap), grad, out, lse_BHT)
    width = q_BHTD.shape[-1]
    return dq[..., :width], dk[..., :width], dv[..., : v_BGSE.shape[-1]]


def _make_block(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None, softcap: float | None
) -> Block:
    """Causality goes into the mask if there is one, for kernels take one or the other."""
    if mask is not None and is_causal:
        mask = mask & mask.new_ones(q.shape[2], q.shape[2]).tril()
    return Block(q=q, k=k, v=v, allowed=mask, is_causal=is_causal and mask is None, scale=scale, softcap=softcap)


def choose_kernel(q: Tensor, v: Tensor, *, has_mask: bool) -> Kernel:
    if q.device.type == "cpu":
        return CPU
    if q.device.type != "cuda" or q.dtype == torch.float64:
        return PRODUCTS
    is_short = max(q.shape[-1], v.shape[-1]) <= _LARGEST_FLASH_HEAD and q.dtype != torch.float32
    return FLASH if is_short and not has_mask and _can_flash(q.device) else EFFICIENT


def lay_out(heads_BHTX: Tensor) -> Tensor:
    """[B, T, H, X] in memory on CUDA, where kernels would otherwise make such a copy at every call."""
    return heads_BHTX.transpose(1, 2).contiguous().transpose(1, 2) if heads_BHTX.is_cuda else heads_BHTX


def by_group(heads_BHTX: Tensor, num_groups: int) -> Tensor:
    """[B, G, H / G, T, X]: query heads beside the key head they look at."""
    grouped: Tensor = heads_BHTX.unflatten(1, (num_groups, -1))
    return grouped


@functools.cache
def _can_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _cpu_forward(block: Block) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        block.q, block.k, block.v, 0.0, block.is_causal, attn_mask=block.bias(), scale=block.scale
    )
    return out, lse


def _cpu_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    tensors = (grad, block.q, block.k, block.v, out, lse)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, block.is_causal, attn_mask=block.bias(), scale=block.scale
    )
    return dq, dk, dv


def _flash_forward(block: Block) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        block.q, block.k, block.v, 0.0, block.is_causal, scale=block.scale
    )
    return out, lse


def _flash_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    tensors, lengths = (grad, block.q, block.k, block.v, out, lse.contiguous()), (block.q.shape[2], block.k.shape[2])
    seed = torch.empty(2, dtype=torch.uint64, device=grad.device)  # of dropout, which there is none of
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        *tensors, None, None, *lengths, 0.0, block.is_causal, seed, seed.new_empty(()), scale=block.scale
    )
    return dq, dk, dv


def _efficient_forward(block: Block) -> tuple[Tensor, Tensor]:
    k, v, bias = _expanded(block)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        block.q, k, v, bias, True, 0.0, block.is_causal, scale=block.scale
    )
    return out, lse[..., : block.q.shape[2]]


def _efficient_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    k, v, bias = _expanded(block)
    seed = torch.empty((), dtype=torch.int64, device=grad.device)
    whole_lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=math.inf)
    tensors = (grad, block.q, k, v, bias, lay_out(out), whole_lse)  # the kernel ignores the strides of `out`
    needed = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        *tensors, seed, seed, 0.0, needed, block.is_causal, scale=block.scale
    )
    num_groups = block.k.shape[1]
    if num_groups < block.q.shape[1]:
        dk, dv = by_group(dk, num_groups).sum(2), by_group(dv, num_groups).sum(2)
    return dq, dk, dv


def _expanded(block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values repeated for every query head, and the bias of every query head."""
    repeats = block.q.shape[1] // block.k.shape[1]
    k, v = (one if repeats == 1 else one.repeat_interleave(repeats, 1) for one in (block.k, block.v))
    bias = block.bias(_BIAS_MULTIPLE)
    return k, v, None if bias is None else bias.expand(*block.q.shape[:3], k.shape[2])


def _products_forward(block: Block) -> tuple[Tensor, Tensor]:
    scores = hide(_scores(block), block.is_causal, block.allowed)
    lse = scores.logsumexp(-1)
    probabilities = scores.sub_(lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp_()
    out = probabilities @ block.v.unsqueeze(2).to(scores.dtype)
    return out.flatten(1, 2).to(block.q.dtype), lse.flatten(1, 2)


def _products_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    num_groups, dtype = block.k.shape[1], block.k.dtype
    wide = accumulator_dtype(dtype)
    scores = _scores(block)
    slope = None if block.softcap is None else (scores / block.softcap).square_().neg_().add_(1.0)
    probabilities = hide(scores, block.is_causal, block.allowed)
    probabilities.sub_(by_group(lse, num_groups).to(wide).unsqueeze(-1)).exp_()
    grad, out, q = (by_group(one, num_groups).to(wide) for one in (grad, out, block.q))
    dv = (probabilities.mT @ grad).sum(2)
    of_probabilities = grad @ block.v.unsqueeze(2).to(wide).mT
    of_scores = probabilities.mul_(of_probabilities.sub_((grad * out).sum(-1, keepdim=True))).mul_(block.scale)
    if slope is not None:  # of softcap · tanh(s / softcap): 1 - tanh²
        of_scores.mul_(slope)
    dq, dk = of_scores @ block.k.unsqueeze(2).to(wide), (of_scores.mT @ q).sum(2)
    return dq.flatten(1, 2).to(dtype), dk.to(dtype), dv.to(dtype)


def _scores(block: Block) -> Tensor:
    """[B, G, H / G, T, S], capped."""
    q, k = block.q, block.k
    wide = accumulator_dtype(q.dtype)
    scores = (by_group(q, k.shape[1]).to(wide) @ k.unsqueeze(2).to(wide).mT).mul_(block.scale)
    return scores if block.softcap is None else scores.div_(block.softcap).tanh_().mul_(block.softcap)


def hide(scores_BGRTS: Tensor, is_causal: bool, mask_B1TS: Tensor | None) -> Tensor:
    """Scores, in place, with -inf where a query may not look."""
    if is_causal:
        square = torch.ones(scores_BGRTS.shape[-2:], dtype=torch.bool, device=scores_BGRTS.device)
        scores_BGRTS.masked_fill_(square.triu(1), -math.inf)
    return scores_BGRTS if mask_B1TS is None else scores_BGRTS.masked_fill_(~mask_B1TS.unsqueeze(1), -math.inf)


CPU = Kernel(forward=_cpu_forward, backward=_cpu_backward)
FLASH = Kernel(forward=_flash_forward, backward=_flash_backward, multiple=8)
EFFICIENT = Kernel(forward=_efficient_forward, backward=_efficient_backward, multiple=8, has_one_width=False)
PRODUCTS = Kernel(forward=_products_forward, backward=_products_backward, has_one_width=False)
