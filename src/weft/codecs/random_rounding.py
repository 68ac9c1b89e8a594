"""QSGD and TernGrad: entries are rounded up or down at random, so that what is sent is on average what was given.

    qsgd       sent = norm · sign(x) · n / s,   n = floor(s·|x| / norm + r), at most s = levels / 2 - 1,   code s ± n
               with the 2-norm of its block of 512 entries, summed in float64
    terngrad   sent = size · sign(x) if r < |x| / size, else 0,    size = the largest |x| of the tensor,    code 0, 1, 2

r is uniform in [0, 1) (`formats/random_bits.py`). Both are unbiased up to the steps of r, 2^-24, so nothing has to be
kept. They pay with variance: an entry of qsgd is off by up to norm / s, and most entries are smaller than that unless s
is at least the root of 512.
"""

from __future__ import annotations

import numpy
import torch
from torch.nn import functional

from weft.codecs.formats.random_bits import uniforms
from weft.codecs.quantised import Quantised
from weft.plan.exchange.quantised import QSGD_BLOCK, QuantisedTensor


class Qsgd(Quantised):
    """Random rounding to multiples of a share of the block's norm."""

    @property
    def _num_steps(self) -> int:
        return self._bucket.codec.levels // 2 - 1

    def quantise(
        self, part: QuantisedTensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = functional.pad(x, (0, part.num_scales * QSGD_BLOCK - x.numel())).view(-1, QSGD_BLOCK)
        scales.copy_(_root(_sum_columns(blocks.double().square())))
        divisors = scales.masked_fill(scales == 0, torch.inf)
        shares = (blocks.abs() / divisors.unsqueeze(1)).view(-1)[: x.numel()]
        steps = shares.mul_(self._num_steps).add_(uniforms(self.key(part), x.numel(), x.dtype, x.device)).floor_()
        steps.clamp_(max=self._num_steps)  # the sum may be rounded up
        return steps.copysign_(x).add_(self._num_steps).to(torch.uint8), scales

    def values_of(self, part: QuantisedTensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        shares = codes.to(scales.dtype).sub_(self._num_steps).div_(self._num_steps)
        norms = scales.unsqueeze(1).expand(-1, QSGD_BLOCK).reshape(-1)
        return shares.mul_(norms[: shares.numel()])


def _sum_columns(terms: torch.Tensor) -> torch.Tensor:
    """The sum of all columns, a power of two: the two halves, then the halves of that."""
    while terms.shape[1] > 1:
        first, second = terms.chunk(2, 1)
        terms = first + second
    return terms.view(-1)


def _root(squares: torch.Tensor) -> torch.Tensor:
    """The square root, rounded to nearest. On CPUs torch's own (Intel's library) is not: 1 in 100 is a bit off."""
    return squares.sqrt() if squares.is_cuda else torch.from_numpy(numpy.sqrt(squares.numpy()))


class TernGrad(Quantised):
    """Random rounding to 0 or the size of the tensor's largest entry."""

    def quantise(
        self, part: QuantisedTensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        smallest, largest = torch.aminmax(x)
        scales.copy_(torch.maximum(smallest.abs(), largest.abs()))
        share = x.abs().div_(scales)
        is_sent = uniforms(self.key(part), x.numel(), x.dtype, x.device) < share  # false where 0 / 0
        return torch.where(is_sent, x.sign(), 0).add_(1).to(torch.uint8), scales

    def values_of(self, part: QuantisedTensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(scales.dtype).sub_(1).mul_(scales)
