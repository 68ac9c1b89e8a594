"""Tensors that are split by rows together with others: as rows where all can be, else made whole first.

Two whole tensors and one that is split are added up on each rank's rows; a function of which nothing is known gets all
of it whole, on every rank. Which of the two happens must be the same on all ranks, for one of them is an exchange: it
follows from whole shapes only, which all ranks have in common.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from weft.errors import ModelError
from weft.parallel.spatial.halo import join
from weft.parallel.spatial.row_tensor import Function, Rows, RowTensor, mark, rows_of
from weft.plan.model_refusals import ROWS_OVERWRITTEN


def joined(value: Any) -> Any:
    """A tensor that is split is made whole; everything else stays."""
    rows = rows_of(value)
    if rows is None:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return join(value, rows)


def join_first(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For everything that is not known: make whole what is split, and go on with the whole on every rank."""
    if overwrites_rows(func, args, kwargs):
        name = func.__name__
        raise ModelError(ROWS_OVERWRITTEN.message(function=name, instead=name.strip("_")))
    args, kwargs = tree_map(joined, (args, kwargs))
    return func(*args, **kwargs)


def overwrites_rows(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "").partition(".")[0]  # of torch.ops.aten.relu_.default, too
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return isinstance(kwargs.get("out"), RowTensor) or (is_in_place and isinstance(args[0], RowTensor))


def aligned(tensors: list[torch.Tensor], *, is_broadcast: bool = True) -> tuple[Rows, list[torch.Tensor]] | None:
    """Tensors that meet as this rank's rows of them; None if rows do not meet rows.

    `is_broadcast`: a whole one of height 1 goes with any number of rows.

    Whole ones are cut where they have the whole height. A gradient of theirs has then this rank's rows only, and what
    made them adds up the ranks', as it does for all that is whole.
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
    """What a function made of rows are rows; what it only handed on is known already."""
    return mark(made, rows) if type(made) is torch.Tensor else made


def elementwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [*args, *kwargs.values()]
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    overwrites = func.__name__.endswith("_") and not func.__name__.endswith("__") or func.__name__.startswith("__i")
    is_possible = "out" not in kwargs and not (overwrites and not isinstance(args[0], RowTensor))
    if func.__name__ == "where" and len(places) == len(values) == 1:
        is_possible = False  # places of what is true, not a choice
    found = aligned([values[place] for place in places]) if is_possible else None
    if found is None:
        return join_first(func, args, kwargs)
    rows, tensors = found
    for place, tensor in zip(places, tensors, strict=True):
        values[place] = tensor
    named = dict(zip(kwargs, values[len(args) :], strict=True))
    return marked(func(*values[: len(args)], **named), rows)
