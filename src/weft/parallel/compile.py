"""`[compile] blocks`: torch.compile on the forward of each block; blocks are alike, so one compilation serves all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.blueprint import Blueprint
from weft.errors import ModelError
from weft.parallel.recompute import find_blocks
from weft.parallel.state.batchnorm import SynchronisedBatchNorm
from weft.parallel.wrapping.wrap import wrap_forward
from weft.plan.model_refusals import COMPILED_STATISTICS


def compile_blocks(model: nn.Module, blueprint: Blueprint) -> None:
    """Compile the forward of each block, in place."""
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
        wrap_forward(block, CompiledForward(block.forward), by="compile", why="runs it compiled; hooks stay outside")


class CompiledForward:
    """A block's compiled forward.

    A copy of the model gets one of its own: a compiled function by itself would be shared, and run the first model.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.compiled = torch.compile(inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self.inner,)
