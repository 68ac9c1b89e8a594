"""Deep Gradient Compression (DGC): few entries of each tensor are sent, after momentum has been applied to all.

Momentum at the optimizer would see sparse sums only, so it is applied here, to this replica's own gradients, before
entries wait to be sent (*momentum correction*): the optimizer adds no momentum of its own.

    u = μ u + g              Nesterov:  u = μ (u + g)
    v = memory × v + u                  v = memory × v + u + g
    sent: about the k largest |v|
    v = 0 where sent, and with `masking` u = 0 too, so that old momentum does not carry on what was sent just now

*About the k largest*: a threshold is estimated from a sample of |v|, one element in 128 but at least 4096, that lie at
equal distances, such that it should let 1.25 k pass; of those that pass the k largest are sent, of equal ones the
first. If fewer than k pass, fewer are sent; zeros never are. The first element of the sample changes with every step.

At density 1 without masking this is SGD with momentum, and with masking SGD without.
"""

from __future__ import annotations

import torch

from weft.codecs.base import Bucket
from weft.codecs.formats.sparse_message import Entries, write_entries
from weft.codecs.kept import Kept
from weft.codecs.sparse import OldNew, SparseCodec
from weft.codecs.topk import largest, scaled
from weft.plan.exchange.messages import Message
from weft.plan.exchange.sparse import threshold_rank


class Dgc(SparseCodec):
    """Sends the largest entries of gradients with momentum; the momentum of what was sent is cleared."""

    is_exact = False

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.momentum: Kept = self.make_kept()
        self.momenta: list[tuple[float, bool]] = [(0.0, False)] * len(bucket.tensors)
        """Of each tensor: the optimizer's momentum, and whether it is Nesterov's."""

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> tuple[Message, ...]:
        num_given, num_tensors = len(self.momenta), len(self.bucket.tensors)
        assert num_given == num_tensors, f"{num_given} momenta for {num_tensors} tensors"
        return super().begin(step, keep=keep)

    def choose(self, place: int, values: torch.Tensor, state: list[OldNew], entries: Entries) -> torch.Tensor:
        (old_residual, new_residual), (old_momentum, new_momentum) = state
        velocity, total = self._accumulate(place, values, old_momentum, old_residual)
        sizes, num_sent, numel = total.abs(), entries.values.numel(), total.numel()
        threshold = None
        if num_sent < numel:
            start, stride, num_sampled = self.sample(self.bucket.tensors[place])
            sampled = sizes[start::stride][:num_sampled]
            threshold = sampled.topk(self.rank(num_sent, numel), sorted=False).values.amin()
        is_sent = largest(sizes, num_sent, threshold)
        write_entries(entries, total, is_sent)
        new_residual.copy_(total.masked_fill(is_sent, 0))
        new_momentum.copy_(velocity.masked_fill_(is_sent, 0) if self.bucket.codec.masking else velocity)
        return total

    def _accumulate(
        self, place: int, values: torch.Tensor, momentum: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new momentum, and all that could be sent."""
        factor, is_nesterov = self.momenta[place]
        total = scaled(residual, self.bucket.codec.memory, self.keep)
        if is_nesterov:
            velocity = scaled(momentum, 1.0, self.keep).add_(values).mul_(factor)
            return velocity, total.add_(velocity).add_(values)
        velocity = scaled(momentum, factor, self.keep).add_(values)
        return velocity, total.add_(velocity)

    def factors(self, place: int) -> tuple[float, float, float, bool]:
        keep, (factor, is_nesterov) = float(self.keep), self.momenta[place]
        return keep * self.bucket.codec.memory, keep * (1.0 if is_nesterov else factor), factor, is_nesterov

    def rank(self, num_sent: int, numel: int) -> int:
        return threshold_rank(num_sent, numel)
