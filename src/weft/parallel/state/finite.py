"""Which tensors hold a value that is not finite.

The largest absolute value of a tensor is not finite exactly where one of its values is not: one pass over memory
without a mask as large as the tensor, and no sum that could overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from weft.parallel.state.buffers import persistent_buffers

_MOST_SHOWN = 3


@torch.no_grad()
def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """The names of the tensors that are not finite; waits for a device once."""
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            by_device.setdefault(tensor.device, []).append((name, tensor.detach()))
    found = []
    for inside in by_device.values():
        largest = torch._foreach_norm([tensor for _, tensor in inside], math.inf)
        is_finite = torch.stack([one.double() for one in largest]).isfinite().tolist()
        found += [name for (name, _), good in zip(inside, is_finite, strict=True) if not good]
    return found


@torch.no_grad()
def spoilt_buffers(model: nn.Module) -> list[str]:
    """The names of buffers that a pass has spoilt: running statistics that are not finite, and any NaN.

    An infinity elsewhere may be meant: masks of attention hold it.
    """
    buffers = persistent_buffers(model)
    statistics = {name: one for name, one in buffers.items() if name.rpartition(".")[2].startswith("running_")}
    others = {name: one for name, one in buffers.items() if name not in statistics}
    infinite = set(not_finite(others.items()))  # waits once, and only then per buffer
    spoilt = [name for name, one in others.items() if name in infinite and torch.isnan(one).any()]
    return not_finite(statistics.items()) + spoilt


def shown(names: list[str]) -> str:
    """The first names of many in quotes, and the number of the others."""
    rest = len(names) - _MOST_SHOWN
    quoted = ", ".join(f'"{name}"' for name in names[:_MOST_SHOWN])
    return f"{quoted} and {rest} more" if rest > 0 else quoted
