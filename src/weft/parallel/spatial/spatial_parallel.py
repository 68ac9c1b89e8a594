"""Spatial parallelism: images split by height over ranks, the sequence axis of vision models.

    rows = SpatialParallel(mesh.group("ring", "neighbours"))
    rows.prepare(model)                      # once, after its BatchNorms are synchronised
    output = rows.call(model, images)        # the whole output, on every rank

Activation memory falls with the number of ranks; weights are replicated. Every rank has a part of the parameters'
gradients and a replica of the loss and the count of samples: the trainer sums all of them over ranks and divides by the
sum of counts. All ranks must draw the same random numbers from torch's generator, because they compute alike after a
join.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from weft.comm.group import Group
from weft.errors import ModelError
from weft.parallel.spatial import rules  # noqa: F401  (its table must be made before functions of torch are replaced)
from weft.parallel.spatial.join import joined
from weft.parallel.spatial.row_tensor import HEIGHT_DIM, Rows, RowTensor, mark
from weft.parallel.state.batchnorm import SynchronisedBatchNorm
from weft.parallel.wrapping.wrap import wrap_forward
from weft.plan.model_refusals import STATISTICS_BEHIND_THE_ROWS


class SpatialParallel:
    """Runs models on images whose rows are split over the ranks of a group."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def prepare(self, model: nn.Module) -> None:
        """Make the BatchNorms of a model accept rows, in place."""
        if self.group.size == 1:
            return
        norms: dict[str, nn.Module] = {n: norm for n, norm in model.named_modules() if isinstance(norm, _BatchNorm)}
        for name, norm in norms.items():
            rows = _NormOfRows(norm, name, self.group.size)
            wrap_forward(norm, rows.forward, by="rows", why="takes its statistics from this rank's rows of every image")

    def split(self, inputs: Any) -> Any:
        """The same tree with this rank's rows of every image (floating-point tensor of 4 dims), all of one height."""
        heights = sorted({leaf.shape[HEIGHT_DIM] for leaf in tree_leaves(inputs) if _is_image(leaf)})
        if len(heights) != 1:
            found = f"heights {', '.join(map(str, heights))}" if heights else "none"
            raise ModelError(
                "[axes] ring splits images (floating-point tensors of samples, channels, height and width) by rows, "
                f"which needs some of one height among the inputs; there are {found}"
            )
        rows = Rows(dim=HEIGHT_DIM, height=heights[0], group=self.group)
        start, stop = rows.own

        def cut(leaf: Any) -> Any:
            if not _is_image(leaf):
                return leaf
            return mark(leaf.narrow(HEIGHT_DIM, start, stop - start).contiguous(), rows)

        return tree_map(cut, inputs)

    def call(self, function: Callable[[Any], Any], inputs: Any) -> Any:
        """The whole output of a function, on every rank; each rank computes on its own rows."""
        if self.group.size == 1:
            return function(inputs)
        output = function(self.split(inputs))
        return tree_map(joined, output)


class _NormOfRows:
    """Replaces the forward of a BatchNorm. Not a closure, so that a copy of the model runs the copy's norms.

    The norm sees this rank's rows as plain tensors, a part of the batch over which ranks share statistics. A whole
    tensor would be counted once per rank.
    """

    def __init__(self, norm: nn.Module, name: str, num_ranks: int) -> None:
        assert isinstance(norm, _BatchNorm)
        self.norm = norm
        self.name = name
        self.num_ranks = num_ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        uses_batch = self.norm.training or not self.norm.track_running_stats
        if uses_batch and not isinstance(input, RowTensor):
            raise ModelError(STATISTICS_BEHIND_THE_ROWS.message(name=self.name, num_ranks=self.num_ranks))
        if uses_batch and not isinstance(self.norm, SynchronisedBatchNorm):
            raise ModelError(
                f'BatchNorm "{self.name}" would take its statistics from the rows of one rank; [axes] ring needs '
                '[data] buffers = "synchronise"'
            )
        inner = type(self.norm).forward
        if not isinstance(input, RowTensor):
            return inner(self.norm, input)
        if input.weft_rows.dim == 1:
            raise ModelError(f'BatchNorm "{self.name}" takes height, which [axes] ring splits, for channels')
        with torch._C.DisableTorchFunctionSubclass():
            local = input.as_subclass(torch.Tensor)
        return mark(inner(self.norm, local), input.weft_rows)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()
