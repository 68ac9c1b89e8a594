"""The contract of a sync: when gradients are exchanged, and with whom. What travels is the codec's business.

`training/trainer.py` calls it in this order, every step, on every rank:

    begin()                      before the first micro-batch: the last step's gradients are let go
    arm()                        before the last micro-batch's forward: from now on gradients may leave when ready
    finish(loss_sum, count)      after the last micro-batch, also by a rank that had no data at all

The loss that is differentiated is a *sum* over this rank's targets over a number all ranks agree on, so syncs add
gradients and never average. After `finish` every parameter's `.grad` is the sum over the data axis; a parameter that no
rank used keeps `grad = None`, one that only other ranks used has their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn


class Sync(Protocol):
    """What the trainer asks of every way to exchange gradients."""

    def begin(self) -> None:
        """Forget the last step's gradients."""

    def arm(self) -> None:
        """The next backward pass is the last one of this step: exchange what it makes ready, beside it."""

    def ignoring(self) -> AbstractContextManager[object]:
        """Backward passes in here only keep this rank in step with the others; their gradients count for nothing."""

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Complete the exchange; returns the loss sum and the count over all ranks, as float tensors."""

    def state(self) -> dict[str, Any]:
        """What must be kept for the same plan to go on to the bit: plain values and tensors."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""


class Alone:
    """One data rank: there is nobody to exchange with."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def arm(self) -> None:
        pass

    def ignoring(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_sum, count

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        del state
