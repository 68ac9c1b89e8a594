"""The regions of a model that the tensor axis shards: declared, shipped with the model, or discovered; never guessed.

The model's own blueprint comes first, then the plan of a Hugging Face model. Otherwise regions are found by tracing an
example through the model (`discovery/`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from weft.blueprint import Blueprint
from weft.errors import ModelError
from weft.parallel.tensor.discovery.find import find
from weft.parallel.tensor.hugging_face_plan import hugging_face_regions
from weft.plan.partition.tensor import Region

log = logging.getLogger("weft")

_TOO_FEW = "too few for [axes] tensor"


def find_regions(
    model: nn.Module,
    blueprint: Blueprint,
    call: Callable[[nn.Module], Any] | None,
    *,
    tensor: int,
    whole_between: Sequence[str] = (),
    is_first: bool = True,
) -> tuple[Region, ...]:
    """The regions of a model for `tensor` ranks. `call` calls a model with an example.

    `whole_between`: modules whose inputs and outputs must be whole activations. `is_first`: this rank warns of layers
    that stay whole because there are more ranks than heads or features.
    """
    regions = blueprint.regions
    if regions is None:
        regions = hugging_face_regions(model)
    if regions is not None:
        refuse_misdeclared(model, regions)
        return regions
    if call is None:
        raise ModelError(
            f"[axes] tensor = {tensor} needs to know how the model splits: it declares no regions in "
            "weft_blueprint(), so give parallelize(..., example=inputs), the inputs of one microbatch, to trace"
        )
    found = find(model, call, tensor=tensor, whole_between=whole_between)
    reasons = [f"{name}: {reason}" for name, reason in found.reasons.items()]
    if not found.regions:
        raise ModelError(
            [
                f"no layer of the model can be split over [axes] tensor = {tensor}: nothing was found where one layer "
                "feeds work on separate features, and that another layer; declare regions in weft_blueprint(), or set "
                "[axes] tensor = 1",
                *reasons[:8],
            ]
        )
    too_few = [reason for reason in reasons if _TOO_FEW in reason]
    if too_few and is_first:
        log.warning("%d layers stay whole on every rank, the first because %s", len(too_few), too_few[0])
    return found.regions


def refuse_misdeclared(model: nn.Module, regions: Sequence[Region]) -> None:
    """Raise for everything that regions state about a model and is not true of it."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = []
    for region in regions:
        layers = (*chain(*region.columns), *region.rows)
        named = (*layers, *(count.module for count in region.counts), *(one.module for one in region.resized))
        listed = (*(cut.name for cut in region.cuts), *region.partial)
        lacking = [f'module "{name}"' for name in named if name not in modules]
        lacking += [f'tensor "{name}"' for name in listed if name not in tensors]
        problems += [f"a region names the {what}, which the model lacks" for what in lacking]
        for cut in region.cuts:
            shape = tuple(tensors[cut.name].shape) if cut.name in tensors else ()
            length = sum(section.length for section in cut.sections)
            if shape and not (cut.dim < len(shape) and shape[cut.dim] == length):
                problems.append(
                    f'a region cuts dim {cut.dim} of "{cut.name}" into sections of {length} entries together, and its '
                    f"shape is {shape}"
                )
        cut_tensors = {id(tensors[cut.name]) for cut in region.cuts if cut.name in tensors}
        for name in chain(*region.columns):
            for part, parameter in modules[name].named_parameters(recurse=False) if name in modules else ():
                if id(parameter) not in cut_tensors:
                    problems.append(f'a region has "{name}" make shares, but does not cut its "{part}"')
    if problems:
        raise ModelError(problems)
