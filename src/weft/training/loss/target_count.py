"""The number of targets that losses are divided by: one number that all ranks share, in every step.

The true number is known only after the exchange, so *the last step's* is used; where they differ, gradients are
corrected by the ratio, in the pass that clips them. With equal batches they are equal, and in no case does a step need
a collective of its own.

Where replicas differ between exchanges, each counts its own targets, and one that has none in a step (the rest of an
epoch may be too short for all) makes no update. The others cannot know that, and go on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.errors import DataError
from weft.mesh import Mesh
from weft.plan.partition.one_worker import is_served
from weft.training.loss.loss import Count

log = logging.getLogger("weft")


@dataclass
class TargetCount:
    """The number of targets in a global batch, as far as a rank knows it."""

    group: Group
    """The ranks that share a batch."""
    replica: int | None = None
    """The number of this rank's replica, where others have batches of their own."""
    shared: float | torch.Tensor | None = None
    """The last step's count over these ranks."""
    is_own: bool = False
    """The loss returns its own count, which is not known before the forward pass."""
    is_late: bool = False
    """The count is taken for unknown before the exchange, as it is where other ranks have a part of the batch."""
    warns: bool = True
    """This rank warns of a replica without targets."""

    @classmethod
    def of(cls, mesh: Mesh) -> TargetCount:
        """The targets of this rank's replica."""
        group = mesh.batch_group("control")
        if is_served(mesh.plan):  # the servers know whether other workers have some
            # A codec keeps sums over targets, in a unit that must be known before the backward pass.
            return cls(group, replica=0, warns=False, is_late=mesh.plan.codec.name != "none")
        replica = mesh.replica if mesh.num_replicas > 1 else None
        return cls(group, replica=replica, warns=mesh.whole_replica("control").index == 0)

    @property
    def _is_known(self) -> bool:
        return self.group.size == 1 and not self.is_own and not self.is_late

    def share(self, counts: Sequence[Count]) -> float | torch.Tensor:
        """The number that every rank divides its loss by: exact with one data rank, else the last step's."""
        local: Count = sum(counts)
        if self._is_known:
            return torch.clamp(local, min=1) if isinstance(local, torch.Tensor) else float(max(local, 1))
        if self.shared is None:
            first = torch.as_tensor(local, dtype=torch.float32).cpu().reshape(1)  # in the first step only
            all_reduce(first, self.group)
            self.shared = max(float(first), 1.0)
        return self.shared

    def correction(self, shared: float | torch.Tensor, count: torch.Tensor) -> float | torch.Tensor | None:
        """The ratio of the shared count to the true one; None where they are known to be equal."""
        if self._is_known:
            return None
        if count.is_cuda:
            # Without targets the last number stays, as on the host, where a step without them does not come here.
            self.shared = count.clamp(min=1) if self.replica is None else torch.where(count > 0, count, shared)
            return shared / self.shared
        true = float(count)
        self.shared = max(true, 1.0)
        return None if true == shared else shared / self.shared

    def found_some(self, count: torch.Tensor, *, step: int, own: Count | None = None) -> bool:
        """False if this rank's replica has no targets in a step, counted from 0; raises if no rank of the run has any.

        `own`: the number of this rank's own, if it has them. True on a GPU where only the GPU knows the count: reading
        it would block, and there `Update` skips by itself.
        """
        if self.replica is None:
            refuse_no_targets(count)
            return True
        is_known = self.group.size == 1 and isinstance(own, int | float)
        found = own if is_known and own is not None else count
        if (isinstance(found, torch.Tensor) and found.is_cuda) or float(found) > 0:
            return True
        if self.warns:
            log.warning(
                "step %d: replica %d has no targets, so it makes no update in this step; give every replica samples in "
                "every step to use all of them alike (told once)",
                step + 1,
                self.replica,
            )
        self.warns = False
        return False


def refuse_no_targets(count: torch.Tensor) -> None:
    """Raise if a count is zero; on a GPU reading it would block."""
    if not count.is_cuda and float(count) == 0:
        raise DataError("no rank has a target in this global batch; every target is -100 or the batch is empty")
