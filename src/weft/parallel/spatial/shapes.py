"""Views, reshapes and concatenations of images split by rows, where height stays a dim of its own.

The new place of height is found by applying the function to a meta tensor of the whole shape in which every dim has a
stride of its own. The result thus depends on whole shapes only, and all ranks decide alike. If height is merged with
another dim, or cut, the map is gathered first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_map

from weft.parallel.spatial.join import JOIN, aligned, marked
from weft.parallel.spatial.row_tensor import Function, Rows, mark, rows_of

STRIDES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099, 1_000_117, 1_000_121)
"""Primes: no stride is a multiple of another, so each identifies its dim."""


def view(func: Function, *args: Any, **kwargs: Any) -> Any:
    """A function that reorders, adds or drops dims, or slices along others than height."""
    x, rows = args[0], rows_of(args[0])
    is_in_place = func.__name__.endswith("_") and func.__name__ != "__getitem__"
    if rows is None or is_in_place or x.dim() > len(STRIDES) or not _is_plain(args[1:], kwargs):
        return JOIN
    whole = torch.empty_strided(rows.whole_shape(x.shape), STRIDES[: x.dim()], device="meta")
    shown = func(whole, *args[1:], **kwargs)
    several = isinstance(shown, tuple | list)
    places = [_place_of(rows, one) for one in (shown if several else [shown])]
    if any(place is None for place in places):
        return JOIN
    made = func(*args, **kwargs)
    for place, one in zip(places, made if several else [made], strict=True):
        assert place is not None
        marked(one, rows.at(place))
    return made


def _place_of(rows: Rows, shown: torch.Tensor) -> int | None:
    """The dim that is height now, if it is there unchanged."""
    found = [
        dim
        for dim, (size, stride) in enumerate(zip(shown.shape, shown.stride(), strict=True))
        if stride == STRIDES[rows.dim] and size == rows.height
    ]
    return found[0] if len(found) == 1 else None


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if arguments are numbers and slices, whose meaning does not depend on the device."""
    kinds = int | slice | type(None) | type(Ellipsis)
    values = [*args, *kwargs.values()]
    flat = [one for value in values for one in (value if isinstance(value, tuple | list) else [value])]
    return all(isinstance(one, kinds) and not isinstance(one, bool) for one in flat)


def squeeze(func: Function, *args: Any, **kwargs: Any) -> Any:
    x, rows = args[0], rows_of(args[0])
    if rows is None or func.__name__.endswith("_"):
        return JOIN
    shape = rows.whole_shape(x.shape)
    asked = kwargs.get("dim", args[1] if len(args) > 1 else range(x.dim()))
    dims = {dim % x.dim() for dim in ([asked] if isinstance(asked, int) else asked)}
    dropped = tuple(sorted(dim for dim in dims if shape[dim] == 1))
    if rows.dim in dropped:
        return JOIN
    return mark(x.squeeze(dropped), rows.at(rows.dim - sum(dim < rows.dim for dim in dropped)))


def reshape(func: Function, *args: Any, **kwargs: Any) -> Any:
    """Height stays split if it is among the new sizes, with as many entries before and after it as it had."""
    x, rows = args[0], rows_of(args[0])
    if rows is None:
        return JOIN
    shape = rows.whole_shape(x.shape)
    shown = _shown(func, args, kwargs)
    before, after = math.prod(shape[: rows.dim]), math.prod(shape[rows.dim + 1 :])
    sizes = list(shown.shape)
    places = [
        dim
        for dim, size in enumerate(sizes)
        if size == rows.height and math.prod(sizes[:dim]) == before and math.prod(sizes[dim + 1 :]) == after
    ]
    if not places or shown.dtype != x.dtype:
        return JOIN
    sizes[places[0]] = rows.num_own
    return marked(x.reshape(sizes), rows.at(places[0]))


def expand(func: Function, *args: Any, **kwargs: Any) -> Any:
    x, rows = args[0], rows_of(args[0])
    if rows is None:
        return JOIN
    sizes = list(_shown(func, args, kwargs).shape)
    place = len(sizes) - x.dim() + rows.dim
    if sizes[place] != rows.height:
        return JOIN
    sizes[place] = rows.num_own
    return mark(x.expand(sizes), rows.at(place))


def _shown(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function on meta tensors of the whole shapes."""

    def without_memory(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        rows = rows_of(value)
        shape = value.shape if rows is None else rows.whole_shape(value.shape)
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return func(*tree_map(without_memory, args), **tree_map(without_memory, kwargs))


def cat(func: Function, tensors: Any, dim: int = 0, **others: Any) -> Any:
    found = None if others else _alike(tensors)
    if found is None or dim % tensors[0].dim() == found[0].dim:
        return JOIN
    return mark(torch.cat(found[1], dim), found[0])


def stack(func: Function, tensors: Any, dim: int = 0, **others: Any) -> Any:
    found = None if others else _alike(tensors)
    if found is None:
        return JOIN
    rows, place = found[0], dim % (tensors[0].dim() + 1)
    return mark(torch.stack(found[1], place), rows.at(rows.dim + (place <= rows.dim)))


def _alike(tensors: Any) -> tuple[Rows, list[torch.Tensor]] | None:
    """This rank's rows of tensors of one number of dims and one height, of which some may be whole; None for others."""
    has_one = len({tensor.dim() for tensor in tensors}) == 1
    return aligned(list(tensors), is_broadcast=False) if has_one else None
