"""Sums of several ranks' memory, block by block, so that what is written back is still in the cache.

Terms are added in rank order, whatever part of a tensor a rank reduces, so results are the same from run to run. 16-bit
numbers are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from weft.comm.shared_memory.native import LEAST_BYTES, find_kernels
from weft.dtypes import HALF_DTYPES

Reduction = Literal["sum", "max", "min"]

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
"""As torch.distributed calls them."""

BLOCK_BYTES = 128 * 1024
"""Small enough for a core's own cache with all its terms, large enough that the cost of calls is negligible."""

_OPERATIONS: dict[Reduction, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduce_into(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor], op: Reduction) -> None:
    """Every target ends as the reduction of all terms, which may be targets too."""
    kernels = find_kernels() if op == "sum" and terms[0].nbytes >= LEAST_BYTES else None
    if kernels is not None and kernels.sums(terms[0].dtype) and _are_dense(*targets, *terms):
        kernels.sum(targets, terms)
        return
    if any(term.data_ptr() == targets[0].data_ptr() for term in terms[2:]):  # it would be overwritten before its turn
        targets = [torch.empty_like(terms[0]), *targets]
    numel, itemsize = terms[0].numel(), terms[0].element_size()
    is_widened = terms[0].dtype in HALF_DTYPES and len(terms) > 2 and op == "sum"
    block = BLOCK_BYTES // (4 if is_widened else itemsize)
    if numel <= block:
        _reduce_block(targets, terms, op, is_widened)
        return
    split_targets = [target.split(block) for target in targets]
    split_terms = [term.split(block) for term in terms]
    for number in range(len(split_terms[0])):
        _reduce_block([one[number] for one in split_targets], [one[number] for one in split_terms], op, is_widened)


def _are_dense(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _reduce_block(
    targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor], op: Reduction, is_widened: bool
) -> None:
    operation = _OPERATIONS[op]
    if is_widened:
        total = terms[0].float()
        for term in terms[1:]:
            total.add_(term)
        first = 0
    else:
        total, first = targets[0], 1
        operation(terms[0], terms[1], out=total)
        for term in terms[2:]:
            operation(total, term, out=total)
    for target in targets[first:]:
        target.copy_(total)


def add_into(output: torch.Tensor, terms: Sequence[torch.Tensor], *, add: bool) -> None:
    """`output` ends as (or grows by) the sum of all terms, added in the finer of the two dtypes and rounded once.

    It may be one of the terms.
    """
    own = terms[0].dtype
    kernels = find_kernels() if output.dtype == own and output.nbytes >= LEAST_BYTES else None
    if kernels is not None and kernels.sums(own) and _are_dense(output, *terms):
        kernels.sum([output], terms, add=add)
        return
    finest = torch.promote_types(output.dtype, own)
    if finest in HALF_DTYPES:
        finest = torch.float32
    block = BLOCK_BYTES // finest.itemsize
    blocks = zip(*(term.split(block) for term in terms), strict=True)
    total = torch.empty(min(block, output.numel()), dtype=finest)
    for target, parts in zip(output.split(block), blocks, strict=True):
        if not add and len(parts) == 2 and finest == own == target.dtype:
            torch.add(parts[0], parts[1], out=target)
            continue
        within = total[: target.numel()]
        within.copy_(parts[0])
        for part in parts[1:]:
            within.add_(part)
        if add:
            target.add_(within)
        else:
            target.copy_(within)
