"""Deep Gradient Compression (DGC): few entries of each tensor are sent, after momentum has been applied to all.

Momentum at the optimizer would see sparse sums only, so it is applied here, to this replica's own gradients, before
entries wait to be sent (*momentum correction*): the optimizer adds no momentum of its own.

    u = μ u + g              Nesterov:  u = μ (u + g)
    v = memory × v + u                  v = memory × v + u + g
    sent: about the k largest |v|
    v = 0 where sent, and with `masking` u = 0 too, so that old momentum does not carry on what was sent just now

*About the k largest*: a threshold is estimated from a sample of |v|, a hundredth of the elements or at least 4096 that
lie at equal distances, such that it should let 1.25 k pass; of those that pass the k largest are sent, of equal ones
the first. If fewer than k pass, fewer are sent; zeros never are. The first element of the sample changes with every
step.

At density 1 without masking this is SGD with momentum, and with masking SGD without.
"""

from __future__ import annotations

import torch

from weft.codecs.base import Bucket, views
from weft.codecs.sparse import SparseCodec, State
from weft.codecs.sparse_message import Entries, write_entries
from weft.codecs.topk import largest, scaled


class Dgc(SparseCodec):
    """Sends the largest entries of gradients with momentum; the momentum of what was sent is cleared."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.momentum = self.make_kept()
        self.momenta: list[tuple[float, bool]] = [(0.0, False)] * len(bucket.tensors)
        """Of each tensor: the optimizer's momentum, and whether it is Nesterov's."""
        self._residual_state: State
        self._momentum_state: State

    def open_state(self) -> None:
        self._residual_state, self._momentum_state = State(self.residual), State(self.momentum)

    def close_state(self) -> None:
        self._residual_state.close()
        self._momentum_state.close()
        del self._residual_state, self._momentum_state

    def choose(self, place: int, values: torch.Tensor, entries: Entries, not_finite: torch.Tensor) -> torch.Tensor:
        tensor, num_sent, masking = self.bucket.tensors[place], entries.values.numel(), self.bucket.codec.masking
        residual, momentum = self._residual_state.part(tensor), self._momentum_state.part(tensor)
        start, stride, num_sampled = self.sample(tensor)
        rank = threshold_rank(num_sent, tensor.numel, num_sampled)
        loops = self.loops(values)
        if loops is not None:
            factor, is_nesterov = self.momenta[place]
            is_not_finite = loops.choose(
                values,
                residual=residual,
                keep_residual=float(self.keep) * self.bucket.codec.memory,
                momentum=momentum,
                keep_momentum=float(self.keep) * (1.0 if is_nesterov else factor),
                nesterov=factor if is_nesterov else None,
                is_masking=masking,
                sample=(start, stride, num_sampled),
                rank=rank,
                counts=entries.counts,
                offsets=entries.offsets,
                sent=entries.values,
            )
            not_finite.add_(is_not_finite)
            return residual[1]
        velocity, total = self._add(place, values, momentum[0], residual[0])
        sizes = total.abs()
        threshold = sizes.new_zeros(())
        if num_sent < tensor.numel:
            threshold = sizes[start::stride][:num_sampled].topk(rank, sorted=False).values.amin()
        is_sent = largest(sizes, num_sent, threshold)
        write_entries(entries, total, is_sent)
        not_finite.add_(total.isfinite().all().logical_not_())
        residual[1].copy_(total.masked_fill_(is_sent, 0))
        momentum[1].copy_(velocity.masked_fill_(is_sent, 0) if masking else velocity)
        return residual[1]

    def _add(
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

    def end(self, is_made: bool | torch.Tensor) -> None:
        self.residual.end(is_made)
        self.momentum.end(is_made)

    def tensors(self) -> dict[str, torch.Tensor]:
        residuals = views(self.bucket, self.residual.settle(), "residual")
        return residuals | views(self.bucket, self.momentum.settle(), "momentum")


def threshold_rank(num_sent: int, numel: int, num_sampled: int) -> int:
    """Which of the sampled sizes, counted from 1 at the largest, is the threshold: 1.25 × num_sent should pass."""
    return min(num_sampled, -(-5 * num_sampled * num_sent // (4 * numel)))
