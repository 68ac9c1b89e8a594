"""Images whose rows are split over the ranks of the ring axis, as the trainer uses them.

Every rank is given whole images and whole targets, computes its rows of every map, and has the whole output. So all
ranks compute the same loss, and it is counted once per rank, in the sum and in the count it is divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from weft.parallel.spatial.spatial_parallel import SpatialParallel
from weft.parallel.wrapping.replacements import Replacements
from weft.training.data.sample_split import MakeWhole, SampleSplit


class RowSplit(SampleSplit):
    """Runs a model on this rank's rows."""

    draws_alike = True

    def __init__(self, rows: SpatialParallel) -> None:
        self._rows = rows
        self.replacements = Replacements()

    def prepare(self, model: nn.Module) -> None:
        self._rows.prepare(model)

    def around(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda inputs: self._rows.call(call, inputs)

    def part_of_output(self, output: Tensor, make: MakeWhole) -> Tensor:
        return make(output.shape) / self._rows.group.size
