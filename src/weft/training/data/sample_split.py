"""Ranks that have parts of every sample, as the trainer sees them: tokens of sequences, or rows of images.

What is cut, and what a pass must know of the whole, differs between the two; when it is asked for does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from weft.parallel.wrapping.replacements import Replacements

MakeWhole = Callable[[Sequence[int]], Tensor]


class SampleSplit(Protocol):
    """Where ranks have parts of every sample: tokens of sequences, or rows of images."""

    replacements: Replacements
    """Context of the model's passes."""
    draws_alike: bool
    """Ranks of one sample draw the same random numbers, instead of each its own for its part."""

    def cut(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """This rank's part of a microbatch."""

    def cut_inputs(self, inputs: Any) -> Any:
        """This rank's part of some inputs."""

    def shorten(self, inputs: Any, most: int) -> Any:
        """Smaller samples of the same kind, for a trial; None if there are too few to tell anything."""

    def part_of_output(self, output: Tensor, make: MakeWhole) -> Tensor:
        """This rank's part of something that is made in the shape which an output of the latest pass has in whole."""

    def part_of_whole(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole output of the latest pass."""

    def enter(self, inputs: Any) -> None:
        """A pass with these inputs begins, or its backward pass does."""

    def prepare(self, model: nn.Module) -> None:
        """Change the model itself, after all else has been done to it."""

    def weight(self, inputs: Any) -> int:
        """What a mean over this rank's part of a sample counts for, where means are over samples: its tokens."""

    def around(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """How the model is called."""
