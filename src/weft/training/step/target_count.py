"""The number of targets that gradients are divided by: one number that all ranks share, in every step.

The true one is known only when the exchange is done, so it is *the last step's*; where they differ, gradients are
corrected by the ratio, in the pass that clips them. With equal batches, which is nearly always, they never do, and no
step pays for a collective of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.errors import DataError
from weft.training.step.loss import Count


class TargetCount:
    """What a rank knows of the number of targets in a global batch."""

    def __init__(self, group: Group, device: torch.device) -> None:
        """`group` shares a global batch."""
        self._group = group
        self._device = device
        self.shared: float | torch.Tensor | None = None
        """The last step's."""
        self.is_own = False
        """The loss counts by itself: the number is not known before the forward pass."""

    @property
    def _is_known(self) -> bool:
        return self._group.size == 1 and not self.is_own

    def share(self, counts: Sequence[Count]) -> float | torch.Tensor:
        """The number every rank divides its loss by: exact with one data rank, else the last step's global count."""
        local: Count = sum(counts)
        if self._is_known:
            return torch.clamp(local, min=1) if isinstance(local, torch.Tensor) else float(max(local, 1))
        if self.shared is None:
            first = torch.as_tensor(local, dtype=torch.float32, device=self._device).reshape(1)
            all_reduce(first, self._group)
            self.shared = max(float(first), 1.0)
        return self.shared

    def correction(self, shared: float | torch.Tensor, count: torch.Tensor) -> float | torch.Tensor | None:
        """The ratio of the count that was shared to the true one; None where they are known to be equal."""
        if self._is_known:
            return None
        if count.is_cuda:
            self.shared = count.clone()
            return shared / count.clamp(min=1)
        true = float(count)
        self.shared = max(true, 1.0)
        return None if true == shared else shared / self.shared


def refuse_no_targets(count: torch.Tensor) -> None:
    """Only where it costs nothing to look."""
    if not count.is_cuda and float(count) == 0:
        raise DataError("no rank has a target in this global batch; every target is -100 or the batch is empty")
