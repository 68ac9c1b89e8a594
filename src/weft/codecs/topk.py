"""Top-k: the largest entries of every tensor are sent as they are, and the rest is added to the next exchange.

    x = values + memory × what was kept        sent: the k largest |x|, of equal ones the first; no zeros
    kept = x − sent

What is sent of x has at least the share k/n of its energy, so what is kept shrinks whatever the values are.
"""

from __future__ import annotations

import torch

from weft.codecs.formats.sparse_message import Entries, write_entries
from weft.codecs.sparse import OldNew, SparseCodec
from weft.plan.exchange.sparse import safe_rank


class TopK(SparseCodec):
    """Sends the largest entries, with error feedback."""

    is_exact = True

    def choose(self, place: int, values: torch.Tensor, state: list[OldNew], entries: Entries) -> torch.Tensor:
        ((old, new),) = state
        total = scaled(old, self.bucket.codec.memory, self.keep).add_(values)
        is_sent = largest(total.abs(), entries.values.numel())
        write_entries(entries, total, is_sent)
        new.copy_(total.masked_fill(is_sent, 0))
        return total

    def factors(self, place: int) -> tuple[float, float, float, bool]:
        return float(self.keep) * self.bucket.codec.memory, 1.0, 1.0, False

    def rank(self, num_sent: int, numel: int) -> int:
        return safe_rank(num_sent, numel)


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
