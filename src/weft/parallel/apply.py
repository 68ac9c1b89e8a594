"""What is done to a model to make it parallel, in order, on one page.

    1. BatchNorm takes its statistics over the whole batch, unless the plan says otherwise
    2. blocks recompute their activations in the backward pass, as far as the plan says
    3. blocks are compiled, last, so that the compiler sees what will run

Before this, its parameters have been put where they belong (`sync/make.py`): equal on all ranks, or shared out.
The model stays the user's own module: same class, same names, same parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from weft.blueprint import Blueprint
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.recompute import find_blocks, recompute_blocks
from weft.parallel.state.batchnorm import SynchronisedBatchNorm, has_batch_norms, synchronise_batch_norms
from weft.plan.model_refusals import COMPILED_STATISTICS


def apply_plan(model: nn.Module, mesh: Mesh, blueprint: Blueprint) -> None:
    """Change a model in place as the mesh's plan says."""
    plan = mesh.plan
    if has_batch_norms(model) and mesh.data_size * mesh.sequence_size > 1 and plan.data.buffers == "synchronise":
        synchronise_batch_norms(model, mesh.batch_group("statistics"))
    if plan.recompute.policy != "none":
        recompute_blocks(model, blueprint, plan.recompute.policy)
    if plan.compile.blocks:
        if plan.axes.pipeline > 1 and plan.pipeline.schedule == "zero-bubble":
            # Compiled code must not reuse in the first half of a backward pass what the second needs. Torch knows this
            # for the whole process only.
            torch._functorch.config.donated_buffer = False
        compile_blocks(model, blueprint)


def compile_blocks(model: nn.Module, blueprint: Blueprint) -> None:
    """`torch.compile` the forward of each block in place: blocks are alike, so one compilation serves all of them."""
    blocks = find_blocks(model, blueprint, asked="[compile] blocks = true", instead="blocks = false")
    problems = [
        COMPILED_STATISTICS.message(name=f"{block_name}.{name}")
        for block_name, block in blocks.items()
        for name, module in block.named_modules()
        if isinstance(module, SynchronisedBatchNorm)
    ]
    if problems:
        raise ModelError(problems)
    for block in blocks.values():
        block.forward = CompiledForward(block.forward)


class CompiledForward:
    """What stands in a compiled block's `forward`, so that hooks on the block stay outside of what is compiled.

    A copy of the model gets one of its own: a compiled function by itself would be shared, and run the first model.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.compiled = torch.compile(inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self.inner,)
