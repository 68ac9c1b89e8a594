"""An operation under way: its results are written when it is waited for, not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from strict_nccl.calls import Call, StrictError
from strict_nccl.client import RefereeClient
from strict_nccl.memory import HeldMemory, as_bytes, poison

Finish = Callable[[list[Any]], Sequence[torch.Tensor]]
"""From the referee's results to the values of the outputs."""


class StrictWork(dist.Work):
    """One call of this rank; `under_way` is the rank's list of those not waited for."""

    def __init__(
        self,
        client: RefereeClient,
        call: Call,
        *,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        finish: Finish,
        under_way: list[StrictWork],
    ) -> None:
        """The call's payload holds the inputs already, so outputs may overlap them."""
        super().__init__()
        self.call = call
        self._client = client
        self._outputs = outputs
        self._finish = finish
        self._under_way = under_way
        self._is_over = False
        before = [work.held for work in under_way]
        for tensor in outputs:
            poison(tensor)
        self.held = [HeldMemory(tensor, is_output=True) for tensor in outputs]
        self.held += [HeldMemory(tensor, is_output=False) for tensor in inputs]
        self._refuse_overlaps(before)
        under_way.append(self)

    @property
    def is_send(self) -> bool:
        return bool(self.call.parts) and not self._outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_over:
            results = self._client.wait(self.call.number)
            self._is_over = True
            self._under_way.remove(self)
            for held in self.held:
                held.check(self.call.describe())
            for output, result in zip(self._outputs, self._finish(results), strict=True):
                as_bytes(output).copy_(as_bytes(result))
        return True

    def is_completed(self) -> bool:
        """Who has seen that a send is over need not wait for it; results are invisible even then."""
        if not self._is_over and self._client.is_over(self.call.number) and self.is_send:
            self.wait()
        return self._is_over or self._client.is_over(self.call.number)

    def _refuse_overlaps(self, others: Sequence[Sequence[HeldMemory]]) -> None:
        for work, theirs in zip(self._under_way, others, strict=True):
            for mine in self.held:
                for held in theirs:
                    if (mine.is_output or held.is_output) and mine.overlaps(held):
                        raise StrictError(
                            f"{self.call.describe()} uses memory of an operation that was not waited for: "
                            f"{work.call.describe()}"
                        )


def refuse_lost(works: Sequence[StrictWork]) -> None:
    """Refuse operations whose results nobody will ever see; a send has none."""
    lost = [work for work in works if not work.is_send]
    if lost:
        raise StrictError(f"never waited for: {'; '.join(work.call.describe() for work in lost)}")
