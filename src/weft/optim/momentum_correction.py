"""The optimizer's side of DGC: gradients that a codec has given momentum already go past the optimizer's own.

DGC accumulates momentum on every rank before it selects what is sent, so the sum of what was sent is applied as it is:

    w := w - lr × sent

Weight decay must not be made sparse, and everything that is not compressed keeps ordinary momentum. Both stay with the
optimizer: compressed parameters show it a gradient of zero, so that its momentum is that of the decay alone, or none at
all where there is no decay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.errors import PlanError
from weft.plan.model_refusals import DGC_OPTIMIZER
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import Plan
from weft.sync.base import Sync


class MomentumTakenOver:
    """Parameters whose momentum a codec has taken over; none unless the codec is DGC."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, sync: Sync | None = None) -> None:
        self._groups: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        """Parameter groups of the optimizer, and those of their parameters that are compressed."""
        compressed = None if sync is None else sync.compressed
        if optimizer is None or sync is None or compressed is None:
            return
        taken = set(compressed.names)
        names = {id(piece.tensor): piece.name for piece in sync.pieces if piece.name in taken}
        group_of: dict[str, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            self._groups.append((group, [one for one in group["params"] if id(one) in names]))
            group_of |= {names[id(one)]: group for one in self._groups[-1][1]}
        largest = max((one.numel() for _, inside in self._groups for one in inside), default=0)
        first = next((one for _, inside in self._groups for one in inside), None)
        self._zeros = None if first is None else torch.zeros(largest, dtype=first.dtype, device=first.device)

        def momenta(wanted: Sequence[str]) -> list[tuple[float, bool]]:
            return [(float(group_of[name]["momentum"]), bool(group_of[name]["nesterov"])) for name in wanted]

        compressed.momenta = momenta

    @contextmanager
    def during(self, overflow: torch.Tensor | None) -> Iterator[None]:
        """Context of the optimizer's step; `overflow`: 1 where a GPU decides that it changes nothing."""
        if not self._groups:
            yield
            return
        sent: list[tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]] = []
        for group, parameters in self._groups:
            there = [one for one in parameters if one.grad is not None]
            sent.append((group, there, [one.grad for one in there if one.grad is not None]))
            for one in there:
                one.grad = self._zero_like(one) if group["weight_decay"] else None
        try:
            yield
        finally:
            for _, there, gradients in sent:
                for one, gradient in zip(there, gradients, strict=True):
                    one.grad = gradient
        for group, there, gradients in sent:
            rate = group["lr"]
            if overflow is None and there and not isinstance(rate, torch.Tensor):
                torch._foreach_add_(there, gradients, alpha=-rate)
                continue
            for one, gradient in zip(there, gradients, strict=True):
                # Not times 0, which what is not finite would survive; and no number is copied from the host.
                made = gradient if overflow is None else gradient.masked_fill(overflow.bool(), 0)
                if isinstance(rate, torch.Tensor):
                    one.sub_(made * rate)
                else:
                    one.sub_(made, alpha=rate)

    def _zero_like(self, parameter: torch.Tensor) -> torch.Tensor:
        assert self._zeros is not None
        return self._zeros[: parameter.numel()].view(parameter.shape)


def take_over_momentum(optimizer: torch.optim.Optimizer, sync: Sync, plan: Plan) -> MomentumTakenOver:
    """Let DGC's codecs have the optimizer's momentum; refuses optimizers whose momentum is another. (Of a worker of
    servers these let it go past theirs.)"""
    if plan.codec.name != "dgc" or (sync.compressed is None and not is_served(plan)):
        return MomentumTakenOver()
    if not isinstance(optimizer, torch.optim.SGD):
        raise PlanError(DGC_OPTIMIZER.message(plan, found=type(optimizer).__name__))
    for setting in ("dampening", "maximize"):
        if any(group[setting] for group in optimizer.param_groups):
            raise PlanError(DGC_OPTIMIZER.message(plan, found=f"SGD with {setting}"))
    return MomentumTakenOver(optimizer, sync)
