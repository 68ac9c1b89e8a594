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
from weft.codecs.random_bits import key_of
from weft.codecs.sparse import SparseCodec, State
from weft.codecs.sparse_message import Entries, write_entries
from weft.codecs.topk import largest, scaled
from weft.plan.exchange.coded_tensor import CodedTensor

_LEAST_SAMPLED = 4096
_SAMPLED_SHARE = 128
"""One element of so many is sampled."""


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
        tensor, num_sent = self.bucket.tensors[place], entries.values.numel()
        part = slice(tensor.offset, tensor.offset + tensor.numel)
        residual, momentum = self._residual_state, self._momentum_state
        velocity, total = self._add(place, values, momentum.old[part], residual.old[part])
        start, stride, num_sampled = self.sample(tensor)
        sizes = total.abs()
        threshold = sizes.new_zeros(())
        if num_sent < tensor.numel:
            sampled = sizes[start::stride][:num_sampled]
            threshold = sampled.topk(threshold_rank(num_sent, tensor.numel, num_sampled), sorted=False).values.amin()
        is_sent = largest(sizes, num_sent, threshold)
        write_entries(entries, total, is_sent)
        not_finite.add_(total.isfinite().all().logical_not_())
        new = residual.new[part]
        new.copy_(total.masked_fill_(is_sent, 0))
        momentum.new[part] = velocity.masked_fill_(is_sent, 0) if self.bucket.codec.masking else velocity
        return new

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

    def sample(self, tensor: CodedTensor) -> tuple[int, int, int]:
        """First element, distance and number of the elements of a tensor from which the threshold is estimated."""
        num_sampled = min(tensor.numel, max(_LEAST_SAMPLED, tensor.numel // _SAMPLED_SHARE))
        stride = tensor.numel // num_sampled
        return key_of(tensor.name, self.step, self.bucket.replica) % stride, stride, num_sampled

    def end(self, is_made: bool | torch.Tensor) -> None:
        self.residual.end(is_made)
        self.momentum.end(is_made)

    def tensors(self) -> dict[str, torch.Tensor]:
        residuals = views(self.bucket, self.residual.settle(), "residual")
        return residuals | views(self.bucket, self.momentum.settle(), "momentum")


def threshold_rank(num_sent: int, numel: int, num_sampled: int) -> int:
    """Which of the sampled sizes, counted from 1 at the largest, is the threshold: 1.25 × num_sent should pass."""
    return min(num_sampled, -(-5 * num_sampled * num_sent // (4 * numel)))
