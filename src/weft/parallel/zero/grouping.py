"""A model as `plan/partition/flat_buffers.py` sees it: its parameters, the block of each, and their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.blueprint import find_tied
from weft.parallel.wrapping.wrap import add_hook
from weft.plan.partition.flat_buffers import DTYPES, ParameterSpec, compute_dtype
from weft.plan.plan import Plan


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch prints as `torch.name`, or that a plan calls "bf16"."""
    dtype: torch.dtype = getattr(torch, DTYPES.get(name, name))
    return dtype


def describe_parameters(model: nn.Module, blocks: Sequence[str] = ()) -> tuple[ParameterSpec, ...]:
    """Every parameter in the order of registration; one that several blocks use belongs to none."""
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _BatchNorm)  # its statistics and affine step are taken in its own dtype
        for parameter in module.parameters(recurse=False)
    }
    outside = {name: number for number, names in layers_outside_blocks(model, blocks).items() for name in names}
    block_of: dict[int, int | None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((number for number, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
        block = outside.get(name.rpartition(".")[0], block)
        block_of[id(parameter)] = block if block_of.get(id(parameter), block) == block else None
    return tuple(
        ParameterSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            block=block_of[id(parameter)],
            is_outside_blocks=block_of[id(parameter)] in (-1, len(blocks)),
            trainable=parameter.requires_grad,
            keeps_dtype=id(parameter) in kept or not parameter.is_floating_point(),
        )
        for name, parameter in model.named_parameters()
    )


def layers_outside_blocks(model: nn.Module, blocks: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Layers that are units of their own under ZeRO-3: embeddings before the blocks (-1), linear layers after them (the
    number of blocks).

    Only those whose parameters nothing else has, and only where they are at least half as large as a block: less
    would not change the peak, and costs a gather.
    """
    if not blocks:
        return {}
    tied = {name.rpartition(".")[0] for names in find_tied(model) for name in names}
    modules = dict(model.named_modules(remove_duplicate=False))
    first, last = (list(modules).index(name) for name in (blocks[0], blocks[-1]))
    found: dict[int, list[str]] = {-1: [], len(blocks): []}
    for place, (name, module) in enumerate(modules.items()):
        if name in tied:
            continue
        if type(module) is nn.Embedding and module.max_norm is None and place < first:
            found[-1].append(name)
        elif type(module) is nn.Linear and place > last and not name.startswith(tuple(f"{one}." for one in blocks)):
            found[len(blocks)].append(name)
    enough = max(_numel(model, [block]) for block in blocks) / 2
    return {number: tuple(layers) for number, layers in found.items() if _numel(model, layers) >= max(enough, 1)}


def _numel(model: nn.Module, names: Sequence[str]) -> int:
    return sum(parameter.numel() for name in names for parameter in model.get_submodule(name).parameters())


def compute_dtypes(model: nn.Module, plan: Plan) -> dict[str, torch.dtype]:
    """Each parameter's dtype while the model computes, by name."""
    return {one.name: torch_dtype(compute_dtype(one, plan)) for one in describe_parameters(model)}


def cast_between_layers(model: nn.Module) -> None:
    """Let each layer cast its input again where buffers, which keep their own dtype, would widen activations.

    BatchNorm and layers that look after their tables when they are moved or cast (they override `_apply`) are not
    concerned; a model without other buffers gets no hooks.
    """
    widening = (
        buffer
        for module in model.modules()
        if not isinstance(module, _BatchNorm) and type(module)._apply is nn.Module._apply
        for buffer in module.buffers(recurse=False)
    )
    if not any(buffer.is_floating_point() for buffer in widening):
        return
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        is_layer = not any(True for _ in module.children()) or isinstance(module, nn.MultiheadAttention)
        if own and is_layer and not isinstance(module, _BatchNorm):
            why = f"casts its input to {own[0].dtype}, which buffers may have widened"
            add_hook(module, "forward_pre", _make_cast(own[0].dtype), by="precision", why=why)


def _make_cast(dtype: torch.dtype) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def cast(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        return tuple(
            arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
        )

    return cast
