"""The split of every sample over ranks, as the trainer uses it: by tokens of sequences, or by rows of images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from weft.parallel.wrapping.replacements import Replacements

MakeWhole = Callable[[Sequence[int]], Tensor]


class SampleSplit(ABC):
    """A split of every sample over ranks. The defaults are those of ranks that are given, and return, whole samples."""

    replacements: Replacements
    """Context of the model's passes."""
    draws_alike: bool
    """Ranks that share a sample draw the same random numbers, not each its own for its part."""

    def cut(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """This rank's part of a microbatch."""
        return inputs, targets

    def cut_inputs(self, inputs: Any) -> Any:
        """This rank's part of some inputs."""
        return inputs

    def shorten(self, inputs: Any, most: int) -> Any:
        """Smaller samples of the same kind, for a trial; None if they are too small for one."""
        return inputs

    @abstractmethod
    def part_of_output(self, output: Tensor, make: MakeWhole) -> Tensor:
        """This rank's part of what `make` returns for the whole shape of an output of the latest pass."""

    def part_of_whole(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole output of the latest pass."""
        return whole

    def enter(self, inputs: Any) -> None:
        """Prepare a forward or backward pass with these inputs."""
        del inputs

    def prepare(self, model: nn.Module) -> None:
        """Change the model itself, after all else has been done to it."""
        del model

    def weight(self, inputs: Any) -> int:
        """Weight of this rank's part when losses average over samples."""
        return 1

    @abstractmethod
    def around(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the function that calls the model."""
