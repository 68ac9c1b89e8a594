"""Whether an optimizer treats every element by itself, found out by trying it.

Under sharding a rank holds a flat range of each tensor. SGD and Adam do not notice; an optimizer that looks at rows,
columns or the norm of a tensor (Muon, Adafactor, LAMB) would silently compute something else. So the given optimizer
takes a few steps on a small matrix as a whole and on two flat pieces of it, and the results must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]

_NUM_STEPS = 3


@torch.no_grad()
def is_elementwise(make_optimizer: OptimizerFactory, device: torch.device) -> bool | None:
    """True or False as tried; None where the optimizer cannot be tried at all (say, it needs a closure)."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator).to(device)
    gradients = [torch.randn(6, 4, generator=generator).to(device) for _ in range(_NUM_STEPS)]
    try:
        whole = _train(make_optimizer, [start], [[gradient] for gradient in gradients])
    except Exception:
        return None
    cuts = [[gradient.flatten()[:10], gradient.flatten()[10:]] for gradient in gradients]
    try:
        pieces = _train(make_optimizer, [start.flatten()[:10], start.flatten()[10:]], cuts)
    except Exception:
        return False
    return torch.allclose(whole[0].flatten(), torch.cat(pieces), rtol=1e-4, atol=1e-6)


def class_name(make_optimizer: OptimizerFactory, device: torch.device) -> str | None:
    """What kind of optimizer it makes; None where it cannot make one for a small matrix."""
    try:
        return type(make_optimizer([{"params": [nn.Parameter(torch.zeros(6, 4, device=device))]}])).__name__
    except Exception:
        return None


def _train(
    make_optimizer: OptimizerFactory,
    starts: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = make_optimizer([{"params": parameters}])
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] or 1e-2  # a rate of zero, before a warm-up, would show nothing
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
