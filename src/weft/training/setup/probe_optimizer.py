"""Test that an optimizer can be given parts of tensors.

Under sharding a rank holds a flat range of each tensor. SGD and Adam do not notice; an optimizer that uses rows,
columns or the norm of a tensor (Muon, Adafactor) would silently compute something else. So the given optimizer takes a
few steps on a small matrix as a whole and on two flat pieces of it, and the results must agree. weft's own LARS and
LAMB need no test: they are told the norms of whole tensors (`optim/tensor_norms.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from weft.optim.tensor_norms import NeedsTensorNorms

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]

_NUM_STEPS = 3
_RATE = 1e-2
"""Used instead of the run's own rate, which may be zero before a warm-up."""


def takes_parts(make_optimizer: OptimizerFactory, device: torch.device) -> bool | None:
    """True if the optimizer updates parts of tensors like whole ones; None if that cannot be tested."""
    made = _try_to_make(make_optimizer, device)
    return isinstance(made, NeedsTensorNorms) or is_elementwise(make_optimizer, device)


@torch.no_grad()
def is_elementwise(make_optimizer: OptimizerFactory, device: torch.device) -> bool | None:
    """True if the optimizer is elementwise; None if it cannot run this test (it needs a closure, for example)."""
    device = torch.device("cpu") if device.type == "meta" else device  # a trial needs values
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator).to(device, torch.float64)
    gradients = [torch.randn(6, 4, generator=generator).to(device, torch.float64) for _ in range(_NUM_STEPS)]
    try:
        whole = _change(make_optimizer, start, gradients)
    except Exception:
        return None
    try:  # each piece with an optimizer of its own, as on two ranks
        first = _change(make_optimizer, start.flatten()[:10], [gradient.flatten()[:10] for gradient in gradients])
        second = _change(make_optimizer, start.flatten()[10:], [gradient.flatten()[10:] for gradient in gradients])
    except Exception:
        return False
    off = (whole.flatten() - torch.cat([first, second])).abs().max()
    return bool(off <= 1e-4 * whole.abs().max())


def class_name(make_optimizer: OptimizerFactory, device: torch.device) -> str | None:
    """The class of the optimizer; None if it cannot be made for a small matrix."""
    made = _try_to_make(make_optimizer, device)
    return None if made is None else type(made).__name__


def _try_to_make(make_optimizer: OptimizerFactory, device: torch.device) -> torch.optim.Optimizer | None:
    try:
        return make_optimizer([{"params": [nn.Parameter(torch.zeros(6, 4, device=device))]}])
    except Exception:
        return None


@torch.no_grad()
def num_states(make_optimizer: OptimizerFactory) -> int:
    """Values that the optimizer keeps per element of a parameter: 2 for Adam; 0 if it cannot be tried."""
    parameter = nn.Parameter(torch.zeros(6, 4))
    try:
        optimizer = make_optimizer([{"params": [parameter]}])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except Exception:
        return 0
    kept = optimizer.state.get(parameter, {}).values()
    return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in kept)


def _change(make_optimizer: OptimizerFactory, start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """The change of a tensor in a few steps."""
    parameter = nn.Parameter(start.clone())
    optimizer = make_optimizer([{"params": [parameter]}])
    for group in optimizer.param_groups:
        group["lr"] = torch.full_like(group["lr"], _RATE) if isinstance(group["lr"], torch.Tensor) else _RATE
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach() - start
