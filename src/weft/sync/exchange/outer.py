"""The arithmetic of an exchange between replicas: what becomes of the weights of the last exchange.

`change` is the mean over replicas of (anchor - weights): old minus new, so that it acts as a gradient.

    average    anchor - change, which is the mean of the weights                                      (local SGD)
    nesterov   momentum := beta × momentum + change;  anchor - rate × (change + beta × momentum)      (DiLoCo)

The second is `torch.optim.SGD(nesterov=True)` with the change as its gradient. All work in place.
"""

from __future__ import annotations

import torch


def average_(anchor: torch.Tensor, change: torch.Tensor) -> None:
    anchor.sub_(change)


def nesterov_(anchor: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor, *, rate: float, beta: float) -> None:
    momentum.mul_(beta).add_(change)
    anchor.add_(change, alpha=-rate).add_(momentum, alpha=-rate * beta)
