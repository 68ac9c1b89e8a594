"""Other shapes of images split by rows: views, reshapes, joints along other dims; height must stay a dim of its own.

Where height ends up is found by doing the same to a tensor of the whole shape that has no memory (torch's "meta"
device), whose strides are unlike each other. Whether the result can stay split thus depends on whole shapes only, and
all ranks decide alike. If height is merged with another dim, or cut, the map is made whole first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_map

from weft.parallel.spatial.join import aligned, join_first, marked
from weft.parallel.spatial.row_tensor import Function, Rows, RowTensor, Rule, mark, rows_of

STRIDES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099, 1_000_117, 1_000_121)
"""Primes, so that no stride comes out as another's multiple: each dim is known by its own."""


def view(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that reorders, adds or drops dims, or takes parts along others than height."""
    x, rows = args[0], rows_of(args[0])
    is_in_place = func.__name__.endswith("_") and func.__name__ != "__getitem__"
    if rows is None or is_in_place or x.dim() > len(STRIDES) or not _is_plain(args[1:], kwargs):
        return join_first(func, args, kwargs)
    whole = torch.empty_strided(rows.whole_shape(x.shape), STRIDES[: x.dim()], device="meta")
    shown = func(whole, *args[1:], **kwargs)
    several = isinstance(shown, tuple | list)
    places = [_place_of(rows, one) for one in (shown if several else [shown])]
    if any(place is None for place in places):
        return join_first(func, args, kwargs)
    made = func(*args, **kwargs)
    for place, one in zip(places, made if several else [made], strict=True):
        assert place is not None
        marked(one, rows.at(place))
    return made


def _place_of(rows: Rows, shown: torch.Tensor) -> int | None:
    """Which dim is height now, if it is there as it was."""
    found = [
        dim
        for dim, (size, stride) in enumerate(zip(shown.shape, shown.stride(), strict=True))
        if stride == STRIDES[rows.dim] and size == rows.height
    ]
    return found[0] if len(found) == 1 else None


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether arguments are numbers and slices, which mean the same on any device."""
    kinds = int | slice | type(None) | type(Ellipsis)
    values = [*args, *kwargs.values()]
    flat = [one for value in values for one in (value if isinstance(value, tuple | list) else [value])]
    return all(isinstance(one, kinds) and not isinstance(one, bool) for one in flat)


def squeeze(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along named dims, all of them: one of several rows may be all that a rank has."""
    x, rows = args[0], rows_of(args[0])
    if rows is None or func.__name__.endswith("_"):
        return join_first(func, args, kwargs)
    shape = rows.whole_shape(x.shape)
    asked = kwargs.get("dim", args[1] if len(args) > 1 else range(x.dim()))
    dims = {dim % x.dim() for dim in ([asked] if isinstance(asked, int) else asked)}
    dropped = tuple(sorted(dim for dim in dims if shape[dim] == 1))
    if rows.dim in dropped:
        return join_first(func, args, kwargs)
    return mark(x.squeeze(dropped), rows.at(rows.dim - sum(dim < rows.dim for dim in dropped)))


def reshape(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes are those of the whole. If height is among them with the same entries before and after, it stays split."""
    x, rows = args[0], rows_of(args[0])
    if rows is None:
        return join_first(func, args, kwargs)
    shape = rows.whole_shape(x.shape)
    shown = func(*tree_map(_without_memory, args), **tree_map(_without_memory, kwargs))
    before, after = math.prod(shape[: rows.dim]), math.prod(shape[rows.dim + 1 :])
    sizes = list(shown.shape)
    places = [
        dim
        for dim, size in enumerate(sizes)
        if size == rows.height and math.prod(sizes[:dim]) == before and math.prod(sizes[dim + 1 :]) == after
    ]
    if not places or shown.dtype != x.dtype:
        return join_first(func, args, kwargs)
    sizes[places[0]] = rows.num_own
    return marked(x.reshape(sizes), rows.at(places[0]))


def _without_memory(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    rows = rows_of(value)
    shape = value.shape if rows is None else rows.whole_shape(value.shape)
    return torch.empty(shape, dtype=value.dtype, device="meta")


def expand(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, rows = args[0], rows_of(args[0])
    if rows is None:
        return join_first(func, args, kwargs)
    sizes = list(func(*tree_map(_without_memory, args), **tree_map(_without_memory, kwargs)).shape)
    place = len(sizes) - x.dim() + rows.dim
    if sizes[place] != rows.height:
        return join_first(func, args, kwargs)
    sizes[place] = rows.num_own
    return mark(x.expand(sizes), rows.at(place))


def cat(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(tensors: Any, dim: int = 0) -> Any:
        rows = _common_rows(tensors)
        if rows is None or dim % tensors[0].dim() == rows.dim:
            return join_first(func, args, kwargs)
        found = aligned(list(tensors), is_broadcast=False)
        return join_first(func, args, kwargs) if found is None else mark(torch.cat(found[1], dim), rows)

    return join_first(func, args, kwargs) if kwargs.keys() - {"tensors", "dim"} else run(*args, **kwargs)


def stack(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(tensors: Any, dim: int = 0) -> Any:
        rows, found = _common_rows(tensors), aligned(list(tensors), is_broadcast=False)
        if rows is None or found is None:
            return join_first(func, args, kwargs)
        place = dim % (tensors[0].dim() + 1)
        return mark(torch.stack(found[1], place), rows.at(rows.dim + (place <= rows.dim)))

    return join_first(func, args, kwargs) if kwargs.keys() - {"tensors", "dim"} else run(*args, **kwargs)


def _common_rows(tensors: Any) -> Rows | None:
    """How all of these are split, which have as many dims and are as high; whole ones may be among them."""
    first = next(tensor for tensor in tensors if isinstance(tensor, RowTensor))
    rows = first.weft_rows
    heights = {
        rows.height if isinstance(one, RowTensor) else one.shape[rows.dim] for one in tensors if one.dim() > rows.dim
    }
    is_common = len({tensor.dim() for tensor in tensors}) == 1 and heights == {rows.height}
    return rows if is_common else None


RULES: tuple[tuple[list[str], Rule], ...] = (
    (
        "permute transpose swapaxes swapdims movedim moveaxis unsqueeze select unbind chunk split __getitem__".split(),
        view,
    ),
    (["squeeze"], squeeze),
    ("view reshape flatten unflatten view_as reshape_as".split(), reshape),
    (["expand", "expand_as", "broadcast_to"], expand),
    (["cat", "concat", "concatenate"], cat),
    (["stack"], stack),
)
