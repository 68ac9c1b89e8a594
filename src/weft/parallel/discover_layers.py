"""Rules for layers that can be split, and for the same functions where they are given something else's weights.

A layer makes new digits of its output features, and notes which digits it contracts. Whether it is split, and along
which of the two, is decided when the whole model has been followed.
"""

from __future__ import annotations

import torch

from weft.parallel.discover_operation import Operation
from weft.parallel.discover_records import Layer, Use
from weft.parallel.discover_shapes import Made
from weft.parallel.features import Dim, Layout, block, is_whole, length, peel, whole


def linear(op: Operation) -> Made:
    x, weight, bias = op.tensor(0, "input"), op.tensor(1, "weight"), op.tensor(2, "bias")
    assert x is not None and weight is not None
    layer = _layer(op, weight)
    if layer is not None:
        return _call(op, layer, x, inputs=len(op.layout(x)) - 1, outputs=x.dim() - 1)
    rows, columns = op.layout(weight)[:-1], op.layout(weight)[-1]
    _contract(op, op.layout(x)[-1], columns)
    if bias is not None and rows:
        op.unify(rows[0], op.layout(bias)[0])
    return [(*op.layout(x)[:-1], *rows)]


def addmm(op: Operation) -> Made:
    """Also the transposed linear layer of GPT-2."""
    added, x, weight = op.tensor(0, "input"), op.tensor(1, "mat1"), op.tensor(2, "mat2")
    assert added is not None and x is not None and weight is not None
    layer = _layer(op, weight)
    if layer is not None:
        return _call(op, layer, x, inputs=1, outputs=1)
    _contract(op, op.layout(x)[-1], op.layout(weight)[-2])
    made = (*op.layout(x)[:-1], op.layout(weight)[-1])
    return [op.broadcast([made, op.layout(added)], [length(dim) for dim in made])]


def convolution(op: Operation) -> Made:
    """Channels are features; pixels stay whole."""
    x, weight = op.tensor(0, "input"), op.tensor(1, "weight")
    assert x is not None and weight is not None
    layer = _layer(op, weight)
    if layer is None:
        return None
    layout = op.layout(x)
    channels = len(layout) - (weight.dim() - 2) - 1
    for pixels in layout[channels + 1 :]:
        op.block(pixels, "mixes neighbours")
    groups = op.get(6, "groups", 1)
    if groups == 1:
        return _call(op, layer, x, inputs=channels, outputs=channels)
    made = _call(op, layer, x, inputs=None, outputs=channels)
    given, makes = (peel(dim, groups) for dim in (layout[channels], layer.outputs))
    assert makes is not None
    block(makes[1], op.why("cuts them by groups"))
    if given is None:
        op.block(layout[channels], "mixes those of a group")
    else:
        op.block(given[1], "mixes those of a group")
        if not is_whole(given[0]) or layer.is_passed:
            op.unify(given[0], makes[0])
            layer.is_passed = True
    return made


def embedding(op: Operation) -> Made:
    ids, weight = op.tensor(0, "input"), op.tensor(1, "weight")
    assert ids is not None and weight is not None
    layer = _layer(op, weight)
    if layer is None:
        op.block(op.layout(weight)[0], "looks some of them up")
        return [(*op.layout(ids), op.layout(weight)[1])]
    is_plain = not any(op.kwargs.get(name) for name in ("max_norm", "sparse", "scale_grad_by_freq"))
    layer.is_given_ids = is_plain and op.tracer.is_given(ids) and (layer.is_given_ids or not layer.given)
    return _call(op, layer, ids, inputs=None, outputs=ids.dim())


def _layer(op: Operation, weight: torch.Tensor) -> Layer | None:
    """The layer whose own code this is, with its own weight."""
    layers = op.tracer.owners.get(id(weight), ())
    return next((layer for layer in layers if layer.name == op.tracer.module), None)


def _call(op: Operation, layer: Layer, x: torch.Tensor, *, inputs: int | None, outputs: int) -> list[Layout]:
    """A layer contracts one dim of x, if any, and makes another in the place `outputs`."""
    layout = op.layout(x)
    tracer = op.tracer
    op.is_layer, op.roots = True, layer.bit
    tracer.end(x)
    others = layout[:outputs]
    for parameter in layer.module.parameters(recurse=False):
        # What it is called with may be shares in other dims: heads that have been made a part of the batch.
        tracer.record.uses.append(Use(roots=tracer.roots(parameter), carried=(), made=(others,)))
    layer.order = layer.order or tracer.next_order()
    layer.given += (id(x),)
    if inputs is not None:
        op.unify(layout[inputs], layer.inputs)
    sizes = op.result.shape[outputs + 1 :]
    return [(*layout[:outputs], layer.outputs, *(whole(size, f'"{layer.name}" made it') for size in sizes))]


def _contract(op: Operation, *dims: Dim) -> None:
    for dim in dims:
        op.block(dim, "adds them up")
