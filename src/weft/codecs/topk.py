"""Top-k: the largest entries of every tensor are sent as they are, and the rest is added to the next exchange.

    x = values + memory × what was kept        sent: the k largest |x|, of equal ones the first; no zeros
    kept = x − sent

What is sent of x has at least the share k/n of its energy, so what is kept shrinks whatever the values are.
"""

from __future__ import annotations

import math

import torch

from weft.codecs.base import Bucket, views
from weft.codecs.sparse import SparseCodec, State
from weft.codecs.sparse_message import Entries, write_entries


class TopK(SparseCodec):
    """Sends the largest entries, with error feedback."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self._state: State

    def open_state(self) -> None:
        self._state = State(self.residual)

    def close_state(self) -> None:
        self._state.close()
        del self._state

    def choose(self, place: int, values: torch.Tensor, entries: Entries, not_finite: torch.Tensor) -> torch.Tensor:
        tensor, memory, num_sent = self.bucket.tensors[place], self.bucket.codec.memory, entries.values.numel()
        old, new = self._state.part(tensor)
        loops = self.loops(values)
        if loops is not None:
            start, stride, num_sampled = self.sample(tensor)
            is_not_finite = loops.choose(
                values,
                residual=(old, new),
                keep_residual=float(self.keep) * memory,
                is_exact=True,
                sample=(start, stride, num_sampled),
                rank=_safe_rank(num_sent, tensor.numel, num_sampled),
                counts=entries.counts,
                offsets=entries.offsets,
                sent=entries.values,
            )
            not_finite.add_(is_not_finite)
            return new
        total = scaled(old, memory, self.keep).add_(values)
        is_sent = largest(total.abs(), num_sent)
        write_entries(entries, total, is_sent)
        not_finite.add_(total.isfinite().all().logical_not_())
        new.copy_(total.masked_fill_(is_sent, 0))
        return new

    def end(self, is_made: bool | torch.Tensor) -> None:
        self.residual.end(is_made)

    def tensors(self) -> dict[str, torch.Tensor]:
        return views(self.bucket, self.residual.settle(), "residual")


def scaled(kept: torch.Tensor, memory: float, keep: float | torch.Tensor) -> torch.Tensor:
    """A copy of what was kept, times the share of it that counts."""
    if isinstance(keep, torch.Tensor):
        return kept * (keep.to(kept.dtype) * memory)
    return kept * (keep * memory)


def largest(sizes: torch.Tensor, num_sent: int, threshold: torch.Tensor | None = None) -> torch.Tensor:
    """True for the `num_sent` largest sizes of one tensor, of equal ones for the first; with a threshold only for those
    of them that reach it. Neither zeros nor what is not a number are among them."""
    may_be_sent = sizes > 0 if threshold is None else (sizes > 0) & (sizes >= threshold)
    if num_sent >= sizes.numel():
        return may_be_sent
    least = sizes.topk(num_sent, sorted=False).values.amin()
    is_larger, is_least = sizes > least, sizes == least
    room = num_sent - is_larger.sum()
    return may_be_sent & (is_larger | (is_least & (is_least.cumsum(0, dtype=torch.int32) <= room)))


def _safe_rank(num_sent: int, numel: int, num_sampled: int) -> int:
    """A rank in a sample, counted from 1 at the largest, that `num_sent` elements of all will most likely reach: then
    the compiled loops need one pass only."""
    mean = num_sampled * num_sent / numel
    return min(num_sampled, math.ceil(mean + 4 * math.sqrt(mean) + 4))
