"""Reductions as a ring of ranks makes them: in the tensor's own dtype, in an order that depends on the element.

Part k of the n parts of a buffer starts at rank k + 1 and grows on its way round the ring, so with three ranks or more
different elements are added in different orders, and 16-bit sums round at every hop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_REDUCE = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.MAX: lambda total, one: torch.maximum(total, one, out=total),
    dist.ReduceOp.MIN: lambda total, one: torch.minimum(total, one, out=total),
}
NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


def reduce_part(versions: Sequence[torch.Tensor], part: int, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """One part of a buffer, reduced over its version on each rank."""
    size = len(versions)
    total = versions[(part + 1) % size].clone()
    for hop in range(2, size + 1):
        _REDUCE[op](total, versions[(part + hop) % size])
    return total


def reduce_whole(versions: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """A whole buffer: as many parts as there are ranks."""
    size = len(versions)
    length = -(-versions[0].numel() // size)
    parts = [[version[part * length : (part + 1) * length] for version in versions] for part in range(size)]
    return torch.cat([reduce_part(part, number, op) for number, part in enumerate(parts)])
