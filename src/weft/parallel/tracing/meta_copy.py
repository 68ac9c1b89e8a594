"""A copy of a model without values, on which its own code is followed."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.parallel.tracing.placeholder import to_meta


def make_meta_copy(
    model: nn.Module,
    units: Sequence[str] = (),
    device: torch.device | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    learns_all: bool = False,
) -> nn.Module:
    """A copy of a model with its parameters, and buffers inside units, on the meta device.

    `device`: buffers outside units are the model's own, moved to this device, where batches are; None: they are copied.
    `dtypes`: compute dtype of parameters by name, where it differs from their own.
    `learns_all`: parameters require gradients even if they are frozen in the model.
    """
    memo: dict[int, Any] = {}
    if device is not None:
        memo = {id(buffer): buffer if buffer.is_meta else buffer.to(device) for buffer in model.buffers()}
    for name in units:
        memo |= {id(buffer): to_meta(buffer) for buffer in model.get_submodule(name).buffers()}
    for name, parameter in model.named_parameters():
        bare = to_meta(parameter.detach()).to((dtypes or {}).get(name, parameter.dtype))
        learns = bare.is_floating_point() or bare.is_complex() if learns_all else parameter.requires_grad
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=learns)
    return copy_with_hooks(model, memo)


def freeze_batch_norms(meta_copy: nn.Module) -> None:
    """In training BatchNorm refuses a single sample, and other data ranks may have more."""
    for module in meta_copy.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def copy_with_hooks(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy whose hooks know the copy: `deepcopy` takes a function as it is, with the original in its closure."""
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in list(hooks.items()):
                hooks[number] = _with_copies(hook, memo)
    return copied


def _with_copies(hook: Callable[..., Any], memo: Mapping[int, Any]) -> Callable[..., Any]:
    """A function with everything in its closure that was copied exchanged for the copy."""
    cells = hook.__closure__ if isinstance(hook, types.FunctionType) else None
    if not isinstance(hook, types.FunctionType) or not cells:
        return hook
    try:
        held = [cell.cell_contents for cell in cells]
    except ValueError:  # a cell that is still empty
        return hook
    if not any(id(one) in memo for one in held):
        return hook
    exchanged = tuple(types.CellType(memo.get(id(one), one)) for one in held)
    made = types.FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, exchanged)
    made.__kwdefaults__, made.__dict__ = hook.__kwdefaults__, dict(hook.__dict__)
    return made
