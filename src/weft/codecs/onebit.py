"""1-bit SGD: of every entry its sign, and of every column of the matrix the mean of its entries of either sign.

    sent = mean of the entries of the column with this sign        so the column's error has mean 0, sign by sign

Entries that are 0 count as positive. The error is not small, only kept: it must go into the next exchange
(`feedback.py`). Entries that fill no row travel as they are, and so do two rows or fewer.
"""

from __future__ import annotations

import torch

from weft.codecs.base import Bucket, Codec, splits
from weft.codecs.feedback import Feedback
from weft.codecs.kept import Kept
from weft.codecs.quantised import Quantised
from weft.plan.exchange.quantised import QuantisedTensor


class OneBit(Quantised):
    """Two means per column, and signs."""

    is_compiled = False  # but with the memory that it needs

    def quantise(
        self, part: QuantisedTensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = x.view(-1, part.tensor.num_columns)
        negative = matrix < 0
        counts = negative.sum(0)
        sums = (_sum_rows(matrix.masked_fill(negative, 0)), _sum_rows(matrix.masked_fill(~negative, 0)))
        means = scales.view(2, -1)
        for mean, total, count in zip(means, sums, (len(matrix) - counts, counts), strict=True):
            torch.div(total, count.clamp(min=1).to(x.dtype), out=mean)
            mean += 0  # no negative zeros: they would depend on the order of the sum
        return negative.view(torch.uint8).view(-1), scales

    def values_of(self, part: QuantisedTensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        positive, negative = scales.view(2, -1)
        return torch.where(codes.view(torch.bool).view(-1, part.tensor.num_columns), negative, positive).view(-1)

    def encode_with_memory(
        self, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor, *, kept: Kept, factor: float
    ) -> bool:
        loops = self._loops(values, message)
        if loops is None or not isinstance(kept.turn, int):
            return False
        tensors = self._bucket.tensors
        split = (splits(tensors, flat) for flat in (values, kept.old, kept.new))
        for part, own, old, new in zip(self._parts, *split, strict=True):
            message[part.codes_stop : part.stop].zero_()
            if not loops.encode_onebit(part, own, old, factor, new, message):
                not_finite += 1
        return True


def _sum_rows(terms: torch.Tensor) -> torch.Tensor:
    """The sum of all rows, neighbours first: 0 and 1, 2 and 3, then pairs of these sums; a last one alone gets 0."""
    while terms.shape[0] > 1:
        if terms.shape[0] % 2:
            terms = torch.cat([terms, torch.zeros_like(terms[:1])])
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def make_onebit(bucket: Bucket) -> Codec:
    """1-bit SGD with its error feedback."""
    return Feedback(OneBit(bucket), bucket)
