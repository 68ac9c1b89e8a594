"""Rules for layers that can be split, and for the same functions where they are given something else's weights.

A layer makes digits of its output features, and knows which digits it contracts. Whether it is split, and along which
of the two, is decided when the whole model has been followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from weft.parallel.tensor.discovery.features import Layout, fresh, is_whole, length, peel, whole
from weft.parallel.tensor.discovery.operation import Operation
from weft.parallel.tensor.discovery.records import Layer, Use
from weft.parallel.tensor.discovery.shape_rules import Made
from weft.parallel.tensor.discovery.symbolic_sizes import Length

if TYPE_CHECKING:
    from weft.parallel.tensor.discovery.trace import Tracer

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
COUNTED = {"in_features": "inputs", "in_channels": "inputs", "nx": "inputs", "num_embeddings": "rows"}
COUNTED |= {"out_features": "outputs", "out_channels": "outputs", "nf": "outputs", "embedding_dim": "outputs"}
"""Attributes of layers that count what may be shared out."""


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one whose weight weft knows how to cut: exactly torch's, or a transposed linear layer."""
    is_known = type(module) in LAYERS or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
    return is_known and isinstance(module._parameters.get("weight"), nn.Parameter)


def is_transposed(module: nn.Module) -> bool:
    """Hugging Face's Conv1D, which is a linear layer whose weight is (in, out)."""
    return type(module) not in LAYERS


def enter_layers(tracer: Tracer, meta_copy: nn.Module) -> int:
    """Note all layers of a model, the numbers in whose attributes are those of shares; the number of bits used."""
    num_bits = 1  # the first stands for what is unknown
    names = {id(parameter): name for name, parameter in meta_copy.named_parameters()}
    for name, module in tracer.record.modules.items():
        if not is_layer(module):
            continue
        layer = Layer(name=name, module=module, bit=1 << num_bits)
        num_bits += 1
        tracer.record.layers[name] = layer
        for attribute, kind in COUNTED.items():
            value = getattr(module, attribute, None)
            if isinstance(value, int):
                dim = getattr(layer, kind) or fresh(value)
                setattr(layer, kind, dim)
                setattr(module, attribute, Length.product((dim,), tracer.note))
        if is_transposed(module):
            layer.inputs = layer.inputs or fresh(module.weight.shape[0])  # type: ignore[index, arg-type]
        for own, parameter in module.named_parameters(recurse=False):
            layer.names[own] = names[id(parameter)]
            tracer.owners.setdefault(id(parameter), []).append(layer)
    for layers in tracer.owners.values():
        if len(layers) > 1:
            for layer in layers:
                layer.tied = tuple(one.name for one in layers)
    return num_bits


def weight_layout(layer: Layer, parameter: torch.Tensor) -> Layout:
    """The dims of a layer's weight or bias, by what they count."""
    module = layer.module
    if parameter is not module._parameters["weight"]:
        return (layer.outputs,)
    if is_transposed(module):
        return layer.inputs, layer.outputs
    if isinstance(module, nn.Embedding):
        return layer.rows, layer.outputs
    kernel = tuple(whole(size, "they are a kernel's") for size in parameter.shape[2:])
    is_grouped = isinstance(module, _ConvNd) and module.groups > 1
    return layer.outputs, whole(parameter.shape[1], "they are a group's") if is_grouped else layer.inputs, *kernel


def linear(op: Operation) -> Made:
    x, weight, bias = op.tensor(0, "input"), op.tensor(1, "weight"), op.tensor(2, "bias")
    assert x is not None and weight is not None
    layer = _layer(op, weight)
    if layer is not None:
        return _call(op, layer, x, inputs=x.dim() - 1, outputs=x.dim() - 1)
    *rows, columns = op.layout(weight)
    op.block(op.layout(x)[-1], "adds them up")
    op.block(columns, "adds them up")
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
    op.block(op.layout(x)[-1], "adds them up")
    op.block(op.layout(weight)[-2], "adds them up")
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
    given, makes = (peel(dim, groups) for dim in (layout[channels], layer.outputs))
    if makes is not None:
        op.block(makes[1], "cuts them by groups")
    if given is None or makes is None:
        op.block(layout[channels], "mixes those of a group")
    else:
        op.block(given[1], "mixes those of a group")
        if layer.is_passed or not is_whole(given[0]):
            op.unify(given[0], makes[0])
            layer.is_passed = True
    return _call(op, layer, x, inputs=None, outputs=channels)


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
    op.layer = layer
    tracer.end(x)
    for parameter in layer.module.parameters(recurse=False):
        # What it is called with may be shares in other dims: heads that have been made a part of the batch.
        tracer.record.uses.append(Use(roots=tracer.roots(parameter), carried=(), made=(layout[:outputs],)))
    layer.order = layer.order or tracer.next_order()
    layer.given += (id(x),)
    if inputs is not None:
        op.unify(layout[inputs], layer.inputs)
    pixels = op.result.shape[outputs + 1 :]
    return [(*layout[:outputs], layer.outputs, *(whole(size, f'"{layer.name}" made them') for size in pixels))]
