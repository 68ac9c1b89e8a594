"""The mean of replicas that differ: what the run is outside of steps, for evaluation, checkpoints and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.parallel.zero.flat_parameters import wait_until_read
from weft.plan.plan import Plan
from weft.sync.exchange.weight_buckets import Part, weight_buckets
from weft.sync.in_process import InProcessExchange
from weft.sync.wrapping_sync import WrappingSync


class ReplicaMean(WrappingSync):
    """A replica's own sync, and the mean over replicas of what they train; the exchange is the subclass's."""

    num_replicas: int
    _group: Group
    """The ranks that hold the same part of each replica."""
    _replica: Group
    """All ranks of this one."""
    _plan: Plan
    _device: torch.device
    _kept_on: torch.device
    """Where copies are kept."""
    _statistics: Callable[[], Sequence[torch.Tensor]]
    _in_process: InProcessExchange | None
    _is_unpublished = False
    """An error ended a context of the mean, and the model may still have it."""

    @torch.no_grad()
    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means over replicas; collective. Integers stay as they are."""
        named = [Part(name="", tensor=one) for one in tensors if one.is_floating_point() or one.is_complex()]
        if self._in_process is not None:
            self._in_process.mean_([one.tensor for one in named])
            return
        for bucket in weight_buckets(named, self._plan.comm.bucket_bytes):
            flat = bucket.read_into(torch.empty(bucket.numel, dtype=bucket.dtype, device=self._device))
            all_reduce(flat, self._group)
            bucket.write_from(flat.div_(self.num_replicas))

    def gather(self, value: Any, group: Group) -> list[Any]:
        """Every replica's value, over a group of hosts between replicas; collective."""
        return gather_values(value, group) if self._in_process is None else self._in_process.gather(value)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Context in which the model, its pieces and running statistics are the mean over replicas; collective.

        After an error the model has its own weights again from the next step, which all ranks begin together."""
        if self.agrees or self.num_replicas == 1:
            yield
            return
        self.inner.settle()
        exchanged = self._exchanged()
        own = [tensor.to(self._kept_on, copy=True) for tensor in exchanged]
        # Ranks may share memory: none may write while another still reads what was there.
        gather_values(None, self._replica)
        self.mean_(exchanged)
        self._publish()
        self.agrees = True
        try:
            yield
            gather_values(None, self._replica)
            wait_until_read(exchanged)
        finally:
            with torch.no_grad():
                for tensor, value in zip(exchanged, own, strict=True):
                    tensor.copy_(value)
            self.agrees, self._is_unpublished = False, True
        self._publish()

    def conclude(self) -> None:
        if self.agrees or self.num_replicas == 1:
            return
        self.inner.settle()
        gather_values(None, self._replica)
        self.mean_(self._exchanged())
        self._publish()
        self.agrees = True

    def _exchanged(self) -> list[torch.Tensor]:
        return [*(piece.tensor.detach() for piece in self.pieces), *self._statistics()]

    def _publish(self) -> None:
        self._is_unpublished = False
        self.inner.publish()
        self.inner.settle()
