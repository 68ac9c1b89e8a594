"""The regions of a model that the tensor axis splits, and models that cannot be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from weft.blueprint import Blueprint
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.tensor.find_regions import find_regions
from weft.parallel.tensor.layers import OutputMode
from weft.plan.model_refusals import (
    BLOCKS_LEFT_OUT_AT_RANDOM,
    BLOCKS_NEEDED,
    STATISTICS_OF_SOME_TOKENS,
    WEIGHTS_INSIDE_AND_OUTSIDE,
)
from weft.plan.partition.tensor import Region
from weft.training.data.trees import map_tensors
from weft.training.step.precision import Caller

_LEAVES_OUT = frozenset({"layerdrop", "stochasticdepth", "stochasticdepthprob", "dropblock", "dropblocks"})
"""Names that models give to the probability of leaving out a block, without underscores."""

DRAWS_FOR_ITS_TOKENS = "each rank draws for its own tokens"


def split_regions(model: nn.Module, mesh: Mesh, blueprint: Blueprint, example: Any) -> tuple[Region, ...]:
    """The regions that the plan's tensor axis splits; the same on all ranks."""
    plan = mesh.plan
    if plan.tensor.sequence:
        _refuse_unsplittable(model, blueprint)
    call: Callable[[nn.Module], Any] | None = None
    if example is not None:
        inputs = map_tensors(lambda tensor: tensor.to(mesh.world.device), example)

        def call(called: nn.Module) -> Any:
            return Caller(called, plan, widens=False)(inputs)

    # Stages pass on whole activations, and tokens are split between blocks only where they are whole.
    between = blueprint.blocks if plan.axes.pipeline > 1 or plan.tensor.sequence else ()
    is_first = mesh.world.rank == 0
    return find_regions(model, blueprint, call, tensor=plan.axes.tensor, whole_between=between, is_first=is_first)


def _refuse_unsplittable(model: nn.Module, blueprint: Blueprint) -> None:
    """Refuse modules that train differently with split tokens, although their output in evaluation is the same."""
    if not blueprint.blocks:
        raise ModelError(BLOCKS_NEEDED.message(asked="[tensor] sequence = true", instead="sequence = false"))
    blocks = {name: model.get_submodule(name) for name in blueprint.blocks}
    problems = [
        STATISTICS_OF_SOME_TOKENS.message(name=f"{block_name}.{name}")
        for block_name, block in blocks.items()
        for name, module in block.named_modules()
        if isinstance(module, _NormBase)
    ]
    problems += left_out(model, "[tensor] sequence = true", "sequence = false", reason=DRAWS_FOR_ITS_TOKENS)
    inside = {parameter for block in blocks.values() for parameter in block.parameters()}
    prefixes = tuple(f"{name}." for name in blocks)
    problems += [
        WEIGHTS_INSIDE_AND_OUTSIDE.message(name=f"{path}.{name}")
        for path, module in model.named_modules(remove_duplicate=False)
        if not f"{path}.".startswith(prefixes)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter in inside
    ]
    if problems:
        raise ModelError(problems)


def left_out(model: nn.Module, asked: str, instead: str, *, reason: str) -> list[str]:
    """Problems with leaving out blocks at random, which not all ranks can do alike."""
    found = {
        path or type(model).__name__: (name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name.replace("_", "") in _LEAVES_OUT and isinstance(value, float) and value > 0
    }
    config = getattr(model, "config", None)
    if not found and isinstance(rate := getattr(config, "layerdrop", 0.0), float) and rate > 0:
        found[type(config).__name__] = ("layerdrop", rate)  # read where it is used (wav2vec 2's family)
    return [
        BLOCKS_LEFT_OUT_AT_RANDOM.message(
            module=place, name=name, value=value, asked=asked, instead=instead, reason=reason
        )
        for place, (name, value) in found.items()
    ]


def refuse_left_out_stages(model: nn.Module) -> None:
    """Refuse a pipeline of a model that leaves out blocks at random: a batch takes one path through the stages."""
    reason = "every batch takes the same way through the stages"
    problems = left_out(model, "[axes] pipeline > 1", "set pipeline = 1", reason=reason)
    if problems:
        raise ModelError(problems)


class KeepingShares:
    """Calls a model whose output stays in shares, for a loss that takes shares."""

    def __init__(self, call: Callable[[Any], Any], mode: OutputMode) -> None:
        self._call = call
        self._mode = mode

    def __call__(self, inputs: Any) -> Any:
        self._mode.is_kept = True
        try:
            return self._call(inputs)
        finally:
            self._mode.is_kept = False
