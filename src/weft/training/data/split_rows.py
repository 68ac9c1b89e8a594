"""Images of which each rank along the ring has some rows, as the trainer sees them.

Every rank is given whole images and whole targets, computes its rows of every map, and has the whole output. So all
ranks take the same loss, and it is counted as often as there are ranks, in the sum and in the count it is divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from weft.parallel.spatial.spatial_parallel import SpatialParallel
from weft.parallel.wrapping.replacements import Replacements
from weft.training.data.sample_split import MakeWhole


class RowSplit:
    """Lets a model run on this rank's rows."""

    draws_alike = True

    def __init__(self, rows: SpatialParallel) -> None:
        self._rows = rows
        self.replacements = Replacements()

    def prepare(self, model: nn.Module) -> None:
        self._rows.prepare(model)

    def cut(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        return inputs, targets

    def cut_inputs(self, inputs: Any) -> Any:
        return inputs

    def shorten(self, inputs: Any, most: int) -> Any:
        del most
        return inputs

    def enter(self, inputs: Any) -> None:
        del inputs

    def around(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda inputs: self._rows.call(call, inputs)

    def part_of_output(self, output: Tensor, make: MakeWhole) -> Tensor:
        return make(output.shape) / self._rows.group.size

    def part_of_whole(self, whole: Tensor) -> Tensor:
        return whole

    def weight(self, inputs: Any) -> int:
        del inputs
        return 1
