"""Rules for layers that can be split, and for the same functions with other weights.

A layer makes new digits for its output features, and unifies its input's with those it contracts. Along which of the
two it is split is decided when the whole model has been followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from weft.parallel.tensor.discovery.features import Layout, fresh, is_whole, split_outer, whole
from weft.parallel.tensor.discovery.operation import Operation
from weft.parallel.tensor.discovery.records import Layer, Use
from weft.parallel.tensor.discovery.shape_rules import Made
from weft.parallel.tensor.discovery.symbolic_sizes import SymbolicInt

if TYPE_CHECKING:
    from weft.parallel.tensor.discovery.trace import Tracer

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
COUNTED = {"in_features": "inputs", "in_channels": "inputs", "nx": "inputs", "num_embeddings": "rows"}
COUNTED |= {"out_features": "outputs", "out_channels": "outputs", "nf": "outputs", "embedding_dim": "outputs"}
"""Attributes of layers that count features or rows."""


def is_layer(module: nn.Module) -> bool:
    """True if weft can cut a module's weight: exactly torch's layers, or a transposed linear layer."""
    is_known = type(module) in LAYERS or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
    return is_known and isinstance(module._parameters.get("weight"), nn.Parameter)


def is_transposed(module: nn.Module) -> bool:
    """True if a layer is Hugging Face's Conv1D, a linear layer whose weight is (in, out)."""
    return type(module) not in LAYERS


def enter_layers(tracer: Tracer, meta_copy: nn.Module) -> int:
    """Record all layers of a model and make sizes in their attributes symbolic; returns the number of bits used."""
    num_bits = 1  # the first is UNKNOWN
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
                setattr(module, attribute, SymbolicInt.product((dim,), tracer.note))
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
    """The digits of a layer's weight or bias."""
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
    x, weight, bias = op.get(0, "input"), op.get(1, "weight"), op.get(2, "bias")
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
    """Includes the transposed linear layer of GPT-2."""
    added, x, weight = op.get(0, "input"), op.get(1, "mat1"), op.get(2, "mat2")
    layer = _layer(op, weight)
    if layer is not None:
        return _call(op, layer, x, inputs=1, outputs=1)
    op.block(op.layout(x)[-1], "adds them up")
    op.block(op.layout(weight)[-2], "adds them up")
    return [op.broadcast((*op.layout(x)[:-1], op.layout(weight)[-1]), op.layout(added))]


def convolution(op: Operation) -> Made:
    """Channels are features; pixels stay whole."""
    x, weight = op.get(0, "input"), op.get(1, "weight")
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
    given, makes = (split_outer(dim, groups) for dim in (layout[channels], layer.outputs))
    if makes is not None:
        op.block(makes[1], "cuts them by groups")
    if given is None or makes is None:
        op.block(layout[channels], "mixes those of a group")
    else:
        op.block(given[1], "mixes those of a group")
        if layer.keeps_groups or not is_whole(given[0]):
            op.unify(given[0], makes[0])
            layer.keeps_groups = True
    return _call(op, layer, x, inputs=None, outputs=channels)


def embedding(op: Operation) -> Made:
    ids, weight = op.get(0, "input"), op.get(1, "weight")
    layer = _layer(op, weight)
    if layer is None:
        op.block(op.layout(weight)[0], "looks some of them up")
        return [(*op.layout(ids), op.layout(weight)[1])]
    is_plain = not any(op.kwargs.get(name) for name in ("max_norm", "sparse", "scale_grad_by_freq"))
    layer.takes_model_input = (
        is_plain and op.tracer.is_model_input(ids) and (layer.takes_model_input or not layer.called_with)
    )
    return _call(op, layer, ids, inputs=None, outputs=ids.dim())


def _layer(op: Operation, weight: torch.Tensor) -> Layer | None:
    """The layer that calls this function in its own forward, with its own weight."""
    layers = op.tracer.owners.get(id(weight), ())
    return next((layer for layer in layers if layer.name == op.tracer.module), None)


def _call(op: Operation, layer: Layer, x: torch.Tensor, *, inputs: int | None, outputs: int) -> list[Layout]:
    """Record a call of a layer, which contracts dim `inputs` of x, if any, and makes dim `outputs`."""
    layout = op.layout(x)
    tracer = op.tracer
    op.layer = layer
    tracer.add_end(x)
    for parameter in layer.module.parameters(recurse=False):
        # x may be a shard along other dims: heads that a view made part of the batch.
        tracer.record.uses.append(Use(sources=tracer.sources(parameter), layout=(), made=(layout[:outputs],)))
    layer.order = layer.order or next(tracer.orders)
    layer.called_with += (id(x),)
    if inputs is not None:
        op.unify(layout[inputs], layer.inputs)
    pixels = op.result.shape[outputs + 1 :]
    return [(*layout[:outputs], layer.outputs, *(whole(size, f'"{layer.name}" made them') for size in pixels))]
