"""What is done to a model to make it parallel, in order, on one page.

    1. parameters and buffers of rank 0 become everybody's
    2. BatchNorm takes its statistics over the data axis, unless the plan says otherwise
    3. blocks are compiled, last, so that the compiler sees what will run

The model stays the user's own module: same class, same names, same parameters.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.blueprint import Blueprint
from weft.comm.collectives import broadcast
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.batchnorm import synchronise_batch_norms


def apply_plan(model: nn.Module, mesh: Mesh, blueprint: Blueprint) -> None:
    """Change a model in place as the mesh's plan says."""
    plan = mesh.plan
    if mesh.size("data") > 1:
        copy_from_first(model, mesh)
        if plan.data.buffers == "synchronise":
            synchronise_batch_norms(model, mesh.group("data", "statistics"))
    if plan.compile.blocks:
        compile_blocks(model, blueprint)


@torch.no_grad()
def copy_from_first(model: nn.Module, mesh: Mesh) -> None:
    """Every rank starts from rank 0's parameters and buffers, whatever its own random state was."""
    group = mesh.group("data", "control")
    for tensor in [*model.parameters(), *model.buffers()]:
        flat = tensor.detach().contiguous()
        broadcast(flat, group)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)


def compile_blocks(model: nn.Module, blueprint: Blueprint) -> None:
    """`torch.compile` each block in place: blocks are alike, so one compilation serves all of them."""
    if not blueprint.blocks:
        raise ModelError(
            "[compile] blocks = true needs a model with a list of blocks, and none was found; "
            "give the model a weft_blueprint() or set blocks = false"
        )
    for name in blueprint.blocks:
        model.get_submodule(name).compile()
