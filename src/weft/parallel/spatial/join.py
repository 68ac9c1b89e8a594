"""Functions of several tensors of which some are split by rows: run on rows if all align, else on gathered tensors.

A whole tensor is cut to this rank's rows to be added to a split one; a function without a rule gets gathered tensors.
Gathering is an exchange, so all ranks must decide alike: the decision depends on whole shapes only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from weft.errors import ModelError
from weft.parallel.spatial.halo import join
from weft.parallel.spatial.row_tensor import Function, Rows, RowTensor, mark, rows_of
from weft.plan.model_refusals import ROWS_OVERWRITTEN

JOIN = object()
"""Returned by a rule that cannot compute on rows: the caller gathers all rows and calls the function itself."""


def joined(value: Any) -> Any:
    """A split tensor gathered on every rank; anything else unchanged."""
    rows = rows_of(value)
    if rows is None:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return join(value, rows)


def join_first(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather whatever is split, then call a function with the whole tensors, on every rank."""
    name = getattr(func, "__name__", "")
    bare = name.partition(".")[0]  # of torch.ops.aten.relu_.default, too
    is_in_place = bare == "__setitem__" or (bare.endswith("_") and not bare.endswith("__"))
    if isinstance(kwargs.get("out"), RowTensor) or (is_in_place and isinstance(args[0], RowTensor)):
        raise ModelError(ROWS_OVERWRITTEN.message(function=name, instead=name.strip("_")))
    args, kwargs = tree_map(joined, (args, kwargs))
    return func(*args, **kwargs)


def aligned(tensors: list[torch.Tensor], *, is_broadcast: bool = True) -> tuple[Rows, list[torch.Tensor]] | None:
    """This rank's rows of tensors that are combined entry by entry; None if their heights do not align.

    Whole tensors of full height are cut; their gradients cover this rank's rows only, and are summed over ranks as for
    everything whole. `is_broadcast`: a whole tensor of height 1 goes with any number of rows.
    """
    first = next(tensor for tensor in tensors if isinstance(tensor, RowTensor))
    rows, num_dims = first.weft_rows, max(tensor.dim() for tensor in tensors)
    from_end = rows.dim - first.dim()
    start, stop = rows.own
    found = []
    for tensor in tensors:
        theirs = rows_of(tensor)
        if theirs is not None:
            if theirs.height != rows.height or theirs.dim - tensor.dim() != from_end:
                return None
        elif tensor.dim() >= -from_end and (tensor.shape[from_end] > 1 or not is_broadcast):
            if tensor.shape[from_end] != rows.height:
                return None
            tensor = tensor.narrow(tensor.dim() + from_end, start, stop - start)
        found.append(tensor)
    return rows.at(num_dims + from_end), found


def marked(made: Any, rows: Rows) -> Any:
    """Mark a new tensor; an operand that a function returned is marked already."""
    return mark(made, rows) if type(made) is torch.Tensor else made


def elementwise(func: Function, *args: Any, **kwargs: Any) -> Any:
    values = [*args, *kwargs.values()]
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    overwrites = func.__name__.endswith("_") and not func.__name__.endswith("__") or func.__name__.startswith("__i")
    if "out" in kwargs or (overwrites and not isinstance(args[0], RowTensor)):
        return JOIN
    if func.__name__ == "where" and len(places) == len(values) == 1:
        return JOIN  # torch.where(condition) returns indices
    found = aligned([values[place] for place in places])
    if found is None:
        return JOIN
    rows, tensors = found
    for place, tensor in zip(places, tensors, strict=True):
        values[place] = tensor
    named = dict(zip(kwargs, values[len(args) :], strict=True))
    return marked(func(*values[: len(args)], **named), rows)
