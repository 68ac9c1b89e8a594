"""From a whole model to what the tensor axis shares out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weft.blueprint import Blueprint
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.tensor import find_regions
from weft.plan.splits import Region
from weft.training.precision import Caller
from weft.training.trees import map_tensors


def split_regions(model: nn.Module, mesh: Mesh, blueprint: Blueprint, example: Any) -> tuple[Region, ...]:
    """What of a model is split over the plan's tensor axis; the same on all ranks."""
    plan = mesh.plan
    if plan.tensor.sequence and not blueprint.blocks:
        raise ModelError(
            "[tensor] sequence = true splits activations between the blocks of a model, and no list of blocks was "
            "found; give the model a weft_blueprint() that names them, or set sequence = false"
        )
    call: Callable[[nn.Module], Any] | None = None
    if example is not None:
        inputs = map_tensors(lambda tensor: tensor.to(mesh.world.device), example)

        def call(called: nn.Module) -> Any:
            return Caller(called, plan, widens=False)(inputs)

    # Stages pass on whole activations, and tokens are split between blocks only where they are whole.
    between = blueprint.blocks if plan.axes.pipeline > 1 or plan.tensor.sequence else ()
    return find_regions(model, blueprint, call, tensor=plan.axes.tensor, whole_between=between)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
