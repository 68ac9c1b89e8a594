"""Choice between splitting samples by tokens and by rows, from the plan and the example."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.blueprint import Blueprint
from weft.errors import ModelError, PlanError
from weft.mesh import Mesh
from weft.parallel.attention.attention_call import make_axes
from weft.parallel.sequence.sequence_parallel import SequenceParallel
from weft.parallel.spatial.spatial_parallel import SpatialParallel
from weft.plan.model_refusals import image_problems
from weft.training.data.sample_split import SampleSplit
from weft.training.data.split_rows import RowSplit
from weft.training.data.split_tokens import SequenceSplit
from weft.training.data.trees import tensors_of
from weft.training.setup.split_layers import DRAWS_FOR_ITS_TOKENS, left_out

log = logging.getLogger("weft")


def choose_sample_split(mesh: Mesh, blueprint: Blueprint, example: Any) -> Callable[[nn.Module], SampleSplit] | None:
    """A function that makes the split for a model, or for a copy of it; None if every rank has whole samples."""
    if mesh.sequence_size == 1:
        return None
    if any(leaf.dim() == 4 and leaf.is_floating_point() for leaf in tensors_of(example)):
        if problems := list(image_problems(mesh.plan)):
            raise PlanError(problems)
        if mesh.world.rank == 0 and any(leaf.dim() > 1 and leaf.dim() != 4 for leaf in tensors_of(example)):
            log.warning(
                "[axes] ring = %d splits the images among the inputs by rows; what the model computes of its other "
                "inputs, and after it has left the images, is done whole on every rank",
                mesh.size("ring"),
            )
        return lambda model: RowSplit(SpatialParallel(mesh.group("ring", "neighbours")))

    axes, has_example = make_axes(mesh), example is not None

    def cut_tokens(model: nn.Module) -> SampleSplit:
        problems = left_out(
            model, "[axes] ring or ulysses > 1", "set [axes] ring and ulysses to 1", reason=DRAWS_FOR_ITS_TOKENS
        )
        if problems:
            raise ModelError(problems)
        sequence = SequenceParallel(model, mesh, blueprint.positions, axes)
        if not has_example and blueprint.positions is None and not sequence.is_known:
            raise ModelError(
                "[axes] ring and ulysses split sequences, and nothing is known of where the model learns positions; "
                "give parallelize(..., example=inputs), by which it is tried, or declare Positions in weft_blueprint()"
            )
        return SequenceSplit(model, sequence, mesh.world.device)

    return cut_tokens
