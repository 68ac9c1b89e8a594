"""Rules for functions that move entries: views, slices, permutations, concatenations."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from weft.parallel.tensor.discovery.features import (
    Dim,
    Layout,
    cut,
    fresh,
    is_whole,
    join,
    length,
    reshape,
    split_outer,
    whole,
)
from weft.parallel.tensor.discovery.operation import Operation
from weft.parallel.tensor.discovery.symbolic_sizes import SymbolicInt, plain

Made = list[Layout] | None
"""Layouts of the tensors that a function returns; None if the rule does not know this form of it."""


def view(op: Operation) -> Made:
    if isinstance(op.get(1, "dtype"), torch.dtype):
        return None
    made = reshape(op.first, op.result.shape, op.why("mixes them with others"))
    if op.name in ("view", "reshape"):
        op.sized_each(op.sizes(1, "size" if op.name == "view" else "shape"), made)
    elif op.name == "unflatten":
        op.sized_each(op.sizes(2, "sizes"), made[op.dim(op.get(1, "dim")) :])
    elif op.name == "squeeze" and len(op.args) == 1 and not op.kwargs:
        kept = tuple(dim for dim in op.first if length(dim) > 1)
        op.tracer.note(kept, lambda local: any(local(dim) == 1 for dim in kept), False)
    elif op.name in ("view_as", "reshape_as"):
        for theirs, mine in zip(op.operand(1), made, strict=True):
            op.equal((theirs, mine))
    return [made]


def permute(op: Operation) -> Made:
    """Dims in another order, which a probe with a stride of its own per dim shows."""
    layout = op.first
    strides = [10**dim for dim in range(len(layout))]
    probe = torch.empty_strided([2] * len(layout), strides, device="meta")
    shown = op.func(probe, *op.args[1:], **{name: value for name, value in op.kwargs.items() if name != "input"})
    return [tuple(layout[strides.index(stride)] for stride in shown.stride())]


def expand(op: Operation) -> Made:
    """Repeated entries are equal, so they can be split along the new dim."""
    layout, sizes = op.first, op.result.shape
    before: Layout = (*(() for _ in range(len(sizes) - len(layout))), *layout)
    made = tuple(dim if length(dim) == size else fresh(size) for dim, size in zip(before, sizes, strict=True))
    if op.name == "expand_as":
        for theirs, mine in zip(op.operand(1), made, strict=True):
            op.equal((theirs, mine))
    else:
        op.sized_each(op.sizes(1, "size"), made)
    return [made]


def repeat(op: Operation) -> Made:
    """The whole dim, several times."""
    layout, given = op.first, op.sizes(1, "dims" if op.name == "tile" else "repeats")
    if len(given) < len(layout):
        return None
    before: Layout = (*(() for _ in range(len(given) - len(layout))), *layout)
    made = []
    for (place, times), dim in zip(given, before, strict=True):
        again = fresh(plain(times))
        op.sized(place, times, (again,))
        made.append((*again, *dim))
    return [tuple(made)]


def repeat_interleave(op: Operation) -> Made:
    """Each entry, several times."""
    times, dim = op.get(1, "repeats"), op.get(2, "dim")
    if not isinstance(times, int) or dim is None:
        return None
    again = fresh(plain(times))
    op.sized((1,) if len(op.args) > 1 else ("repeats",), times, (again,))
    made = list(op.first)
    made[op.dim(dim)] = (*made[op.dim(dim)], *again)
    return [tuple(made)]


def split(op: Operation) -> Made:
    dim = op.dim(op.get(2, "dim", 0))
    sizes = [piece.shape[dim] for piece in op.result]
    if 0 in sizes:
        return None
    pieces = _pieces(op, dim, sizes)
    names = ("split_size", "split_sizes", "split_size_or_sections", "chunks", "sections", "indices_or_sections")
    name = next((name for name in names if name in op.kwargs), "")
    given = op.get(1, name)
    if isinstance(given, int):
        if len(set(sizes)) > 1:  # on a shard, another piece would be the shorter one
            op.block(op.first[dim], "makes pieces of unequal length")
        op.equal(pieces)
        if op.name == "split":
            op.sized((1,) if len(op.args) > 1 else (name,), given, (pieces[0],))
    elif op.name == "tensor_split":
        return None
    else:
        op.sized_each(op.sizes(1, name), pieces)
    return [_with(op.first, dim, piece) for piece in pieces]


def unbind(op: Operation) -> Made:
    dim = op.dim(op.get(1, "dim", 0))
    pieces = _pieces(op, dim, [1] * length(op.first[dim]))
    return [_with(op.first, dim, piece, is_dropped=True) for piece in pieces]


def select(op: Operation) -> Made:
    dim = op.dim(op.get(1, "dim"))
    return [_with(op.first, dim, _one(op, op.first[dim], op.get(2, "index")), is_dropped=True)]


def narrow(op: Operation) -> Made:
    dim, start, size = op.dim(op.get(1, "dim")), op.get(2, "start"), op.get(3, "length")
    if not isinstance(start, int) or plain(start) < 0 or "start" in op.kwargs or "length" in op.kwargs:
        return None
    before, piece, _ = _around(op, op.first[dim], plain(start), plain(start) + plain(size))
    op.sized((2,), start, before)
    op.sized((3,), size, (piece,))
    return [_with(op.first, dim, piece)]


def index(op: Operation) -> Made:
    """x[...] and x[...] = y."""
    layout, given = op.first, op.args[1]
    items = given if isinstance(given, tuple) else (given,)
    num_dims = sum(1 for item in items if item is not None and item is not Ellipsis)
    num_left = len(layout) - num_dims
    picks = [item for item in items if isinstance(item, torch.Tensor)]
    if num_left < 0 or any(isinstance(item, bool) or not _is_simple(item) for item in items):
        return None
    if picks and (len(picks) > 1 or any(isinstance(item, int) for item in items)):
        return None  # torch's order of the resulting dims depends on the positions of the indices
    made: list[Dim] = []
    place = 0
    for position, item in enumerate(items):
        where: tuple[int, ...] = (1, position) if isinstance(given, tuple) else (1,)
        if item is None:
            made.append(())
        elif item is Ellipsis:
            made += layout[place : place + num_left]
            place += num_left
        elif isinstance(item, slice):
            made.append(_slice(op, layout[place], item, where))
            place += 1
        elif isinstance(item, torch.Tensor):
            op.block(layout[place], "picks some of them")
            made += op.layout(item)
            place += 1
        else:
            _one(op, layout[place], item)
            place += 1
    made += layout[place:]
    if op.name == "getitem":
        return [tuple(made)]
    value = op.args[2]
    if isinstance(value, torch.Tensor):
        op.broadcast(tuple(made), op.layout(value))
    op.written = tuple(made)
    return []


def cat(op: Operation) -> Made:
    tensors = op.get(0, "tensors")
    layouts = [op.layout(tensor) for tensor in tensors if tensor.shape != (0,)]  # torch ignores these
    if len({len(layout) for layout in layouts}) > 1:
        return None
    dim = op.dim(op.get(1, "dim", 0), len(layouts[0]))
    made = list(layouts[0])
    for place in range(len(made)):
        if place == dim:
            made[dim] = join([layout[dim] for layout in layouts])
        else:
            for other in layouts[1:]:
                op.unify(made[place], other[place])
    return [tuple(made)]


def stack(op: Operation) -> Made:
    tensors = op.get(0, "tensors")
    layouts = [op.layout(tensor) for tensor in tensors]
    dim = op.dim(op.get(1, "dim", 0), len(layouts[0]) + 1)
    for other in layouts[1:]:
        for mine, theirs in zip(layouts[0], other, strict=True):
            op.unify(mine, theirs)
    new = whole(len(layouts), op.why("made them"))
    return [(*layouts[0][:dim], new, *layouts[0][dim:])]


def as_complex(op: Operation) -> Made:
    op.block(op.first[-1])
    return [op.first[:-1]]


def as_real(op: Operation) -> Made:
    return [(*op.first, whole(2, op.why("made them")))]


def _is_simple(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return item.dtype not in (torch.bool, torch.uint8)
    return item is None or item is Ellipsis or isinstance(item, int | slice)


def _with(layout: Layout, dim: int, piece: Dim, *, is_dropped: bool = False) -> Layout:
    return (*layout[:dim], *(() if is_dropped else (piece,)), *layout[dim + 1 :])


def _pieces(op: Operation, dim: int, sizes: list[int]) -> list[Dim]:
    return cut(op.first[dim], list(accumulate(sizes[:-1])), op.why("cuts them inside a unit"))


def _around(op: Operation, dim: Dim, start: int, stop: int) -> tuple[list[Dim], Dim, list[Dim]]:
    """The pieces before, between and after two positions."""
    size = length(dim)
    pieces = cut(dim, [bound for bound in (start, stop) if 0 < bound < size], op.why("cuts them inside a unit"))
    first = 1 if 0 < start < size else 0
    return pieces[:first], pieces[first], pieces[first + 1 :]


def _one(op: Operation, dim: Dim, place: Any) -> Dim:
    """One entry of a dim, whose index must mean the same on all ranks."""
    size = length(dim)
    start = plain(place) % size
    before, piece, after = _around(op, dim, start, start + 1)
    others = after if plain(place) < 0 else before
    op.tracer.note(tuple(others), lambda local: [local(other) for other in others], [*map(length, others)])
    return piece


def _slice(op: Operation, dim: Dim, item: slice, where: tuple[int, ...]) -> Dim:
    size = length(dim)
    start, stop, step = item.indices(size)
    if (start, stop, step) == (0, size, 1) or size == 0:
        if isinstance(item.stop, SymbolicInt):
            op.sized((*where, "stop"), item.stop, (dim,))
        return dim
    if step == 1 and start < stop:
        before, piece, after = _around(op, dim, start, stop)
        sides = (("start", item.start, before, [piece, *after]), ("stop", item.stop, [*before, piece], after))
        for name, value, passed, ahead in sides:
            known = plain(value)
            if known and known < size:
                op.sized((*where, name), value if known > 0 else -known, passed if known > 0 else ahead)
        return piece
    if step > 1 and start < step and stop > size - step and size % step == 0 and not is_whole(dim):
        halves = split_outer(dim, size // step)
        if halves is not None:
            outer, inner = halves
            return (*outer, *_one(op, inner, start))
    op.block(dim, "picks some of them")
    return whole(len(range(start, stop, step)), op.why("picks some of them"))
