"""Vocabulary-parallel cross-entropy: every rank has a slice of each row of logits, and no row is ever gathered.

    each rank, for every row of its slice z     with all ranks
    1  m' = max z,  s' = Σ exp(z − m')
                                                2  m = max of all m'
    3  s' · exp(m' − m),  z of the target
       where it is in this slice, else 0
                                                4  S, z_y = the sums of both, in one message
    5  loss = m − z_y + log S
    6  gradient = exp(z − m') · exp(m' − m) / S, less 1 at the target

Rows are processed in blocks that stay in the cache from one operation to the next. The exponentials of step 1 are kept
for step 6, where they become the gradient in place. For 16-bit logits, which are computed in float32, they would take
twice the memory: the logits are kept instead. Other losses than the built-in one get whole logits by `gather_logits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.group import Group
from weft.dtypes import accumulator_dtype
from weft.plan.partition.tensor import shares

IGNORED_TARGET = -100

BLOCK_BYTES = 2**23
"""Size of a block of rows: it fits a processor's cache, and threads seldom wait for one another."""
DEVICE_BLOCK_BYTES = 2**28
"""The same on a GPU, where it only bounds temporary memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's slice of the vocabulary. Slices of different ranks may differ in length."""

    start: int
    stop: int
    total: int
    """Entries of the whole vocabulary."""

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop <= self.total, f"{self} is not a slice of a vocabulary"

    @property
    def width(self) -> int:
        return self.stop - self.start

    def find(self, tokens: Tensor, what: str = "token") -> tuple[Tensor, Tensor]:
        """(index in this slice, else 0; whether it is in another rank's) of every token.

        A token outside the vocabulary is refused on a CPU. A GPU, which must not be waited for, is given an index that
        does not exist, at which it stops as in torch's own functions.
        """
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = (int(bound) for bound in torch.aminmax(tokens))
            if low < 0 or high >= self.total:
                found = low if low < 0 else high
                raise IndexError(f"{what} {found} is outside the vocabulary of {self.total} entries")
        elsewhere = (tokens < self.start) | (tokens >= self.stop)
        is_outside = (tokens < 0) | (tokens >= self.total)
        return torch.where(elsewhere, torch.where(is_outside, self.width, 0), tokens - self.start), elsewhere


def split_cross_entropy_sum(logits: Tensor, targets: Tensor, vocabulary: Share, group: Group) -> Tensor:
    """The sum over targets other than −100, the same on every rank to the bit.

    `logits` (..., vocabulary.width) are this rank's; `targets` (...) are of the whole vocabulary, alike on all ranks.
    The gradient can be computed once only: it overwrites what was kept for it.
    """
    assert logits.shape[-1] == vocabulary.width, f"{logits.shape[-1]} logits per row are not those of {vocabulary}"
    rows, flat_targets = logits.reshape(-1, vocabulary.width), targets.reshape(-1)
    if len(rows) != len(flat_targets):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} have {len(rows)} rows and there are {len(flat_targets)} targets; "
            "give one target per row"
        )
    loss: Tensor = _CrossEntropySum.apply(rows, flat_targets, vocabulary, group)  # type: ignore[no-untyped-call]
    return loss


def gather_logits(logits: Tensor, vocabulary: Share, group: Group) -> Tensor:
    """Whole logits (..., total) on every rank, from slices that are those of `plan.partition.tensor.shares`.

    Every rank must compute the same loss of them: it takes its slice of its own gradient, without communication.
    """
    assert logits.shape[-1] == vocabulary.width, f"{logits.shape[-1]} logits per row are not those of {vocabulary}"
    assert (vocabulary.start, vocabulary.stop) == shares(vocabulary.total, group.size)[group.index]
    if group.size == 1:
        return logits
    whole: Tensor = _GatherLogits.apply(logits, vocabulary, group)  # type: ignore[no-untyped-call]
    return whole


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Share, group: Group) -> Tensor:
        dtype = accumulator_dtype(logits.dtype)
        column = targets.unsqueeze(1)
        is_counted = column != IGNORED_TARGET
        place, elsewhere = vocabulary.find(torch.where(is_counted, column, vocabulary.start), "target")
        is_here = is_counted & ~elsewhere
        kept = torch.empty_like(logits) if ctx.needs_input_grad[0] and logits.dtype == dtype else None
        maxima = logits.new_empty(len(logits), 1, dtype=dtype)
        message = logits.new_empty(2, len(logits), 1, dtype=dtype)
        sums, target_logits = message
        for rows, block in _blocks(logits, dtype, kept):
            wide = _widened(logits[rows], block)
            # Finite also where the whole slice of a row is masked, for −inf − (−inf) is NaN.
            maxima[rows] = wide.amax(-1, keepdim=True).clamp_(min=torch.finfo(wide.dtype).min)
            torch.sub(wide, maxima[rows], out=block).exp_()
            torch.sum(block, -1, keepdim=True, out=sums[rows])
        top = maxima.clone()
        all_reduce(top, group, op="max")
        relative = (maxima - top).exp_()
        sums.mul_(relative)
        target_logits.copy_(torch.where(is_here, logits.gather(1, place), 0.0))
        all_reduce(message, group)
        weights = torch.where(is_counted, relative.div_(sums), 0.0)
        ctx.save_for_backward(logits if kept is None else kept, maxima, weights, place, is_here)
        ctx.is_kept = kept is not None
        return torch.where(is_counted, (top - target_logits).add_(sums.log_()), 0.0).sum()

    @staticmethod
    @once_differentiable  # a second derivative would silently miss the other ranks' part
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, maxima, weights, place, is_here = ctx.saved_tensors
        scale, less = weights * grads[0], is_here * -grads[0]
        gradient = saved if ctx.is_kept else torch.empty_like(saved)
        for rows, block in _blocks(saved, maxima.dtype, saved if ctx.is_kept else None):
            if not ctx.is_kept:
                torch.sub(_widened(saved[rows], block), maxima[rows], out=block).exp_()
            block.mul_(scale[rows]).scatter_add_(1, place[rows], less[rows])
            if not ctx.is_kept:
                gradient[rows] = block
        return gradient, None, None, None


def _blocks(logits: Tensor, dtype: torch.dtype, kept: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """(rows, memory for them) of each block: their place in `kept`, or else memory that all blocks reuse."""
    num_rows, width = logits.shape
    if logits.device.type == "cpu":
        limit_bytes = BLOCK_BYTES
    else:
        limit_bytes = DEVICE_BLOCK_BYTES if kept is None else logits.nbytes
    each = max(1, limit_bytes // (width * dtype.itemsize))
    memory = logits.new_empty(min(each, num_rows), width, dtype=dtype) if kept is None else kept
    for start in range(0, num_rows, each):
        rows = slice(start, min(start + each, num_rows))
        yield rows, memory[: rows.stop - start] if kept is None else memory[rows]


def _widened(logits: Tensor, block: Tensor) -> Tensor:
    """Logits to subtract from: a GPU mixes dtypes at no cost, a CPU is faster after a conversion."""
    return block.copy_(logits) if logits.dtype != block.dtype and logits.device.type == "cpu" else logits


class _GatherLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocabulary: Share, group: Group) -> Tensor:
        ctx.slice = slice(vocabulary.start, vocabulary.stop)
        widths = [stop - start for start, stop in shares(vocabulary.total, group.size)]
        leading = logits.shape[:-1]
        message = logits.new_empty(*leading, max(widths))
        message[..., : vocabulary.width] = logits
        gathered = logits.new_empty(group.size, *message.shape)
        all_gather(gathered.view(-1), message.view(-1), group)
        return torch.cat([part[..., :width] for part, width in zip(gathered, widths, strict=True)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][..., ctx.slice], None, None
