"""Which parameters share a flat buffer, and in which number formats.

Stages 0 to 2 of ZeRO put trainable parameters into buckets of about `[comm] bucket_bytes`, in the reverse order of
registration, which is about the order in which gradients become ready. Stage 3 has one unit a block and one, the root,
for everything else: the embedding, the last norm, the head, and whatever two blocks share. Parameters of different
dtypes, and frozen and trainable ones, never share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.blueprint import Blueprint
from weft.parallel.wrapping.wrap import add_hook
from weft.parallel.zero.flat_parameters import FlatKind
from weft.plan.partition.wire import Member, shard_buckets
from weft.plan.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Parameters that will share a flat buffer."""

    named: tuple[Named, ...]
    kind: FlatKind
    unit: str
    """The block they belong to; empty for the root, and for buckets."""


def flat_kinds(model: nn.Module, plan: Plan) -> dict[str, FlatKind]:
    """The number formats of every parameter, by name."""
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _BatchNorm)  # its statistics and affine step are taken in its own dtype
        for parameter in module.parameters(recurse=False)
    }
    kinds = {}
    for name, parameter in model.named_parameters():
        own = parameter.dtype
        is_cast = plan.precision.compute != "model" and own.is_floating_point and id(parameter) not in kept
        compute = DTYPES[plan.precision.compute] if is_cast else own
        master = torch.promote_types(own, torch.float32) if is_cast and parameter.requires_grad else own
        kinds[name] = FlatKind(compute=compute, master=master, trainable=parameter.requires_grad)
    return kinds


def cast_between_layers(model: nn.Module) -> None:
    """Where buffers, which keep their own dtype, would widen activations: let each layer cast its input again.

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


def make_members(model: nn.Module, blueprint: Blueprint, plan: Plan) -> list[Members]:
    """All flat buffers of a model in the order of use: units from first to last, the root at the very front."""
    kinds = flat_kinds(model, plan)
    if plan.data.shard == "parameters":
        return _units(model, blueprint, kinds)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    members = [
        Member(numel=parameter.numel(), item_bytes=kinds[name].compute.itemsize, kind=str(kinds[name]))
        for name, parameter in trainable
    ]
    return [
        Members(named=tuple(trainable[index] for index in bucket), kind=kinds[trainable[bucket[0]][0]], unit="")
        for bucket in reversed(shard_buckets(members, plan.comm.bucket_bytes))
    ]


def _units(model: nn.Module, blueprint: Blueprint, kinds: dict[str, FlatKind]) -> list[Members]:
    unit_of: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block in blueprint.blocks if name.startswith(f"{block}.")), "")
        unit_of[id(parameter)] = block if unit_of.get(id(parameter), block) == block else ""
    return [
        members
        for unit in ("", *blueprint.blocks)
        for members in _by_kind([(n, p) for n, p in model.named_parameters() if unit_of[id(p)] == unit], kinds, unit)
    ]


def _by_kind(named: Sequence[Named], kinds: dict[str, FlatKind], unit: str) -> list[Members]:
    together: dict[FlatKind, list[Named]] = {}
    for name, parameter in named:
        together.setdefault(kinds[name], []).append((name, parameter))
    return [Members(named=tuple(inside), kind=kind, unit=unit) for kind, inside in together.items()]
