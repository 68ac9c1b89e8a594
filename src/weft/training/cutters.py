"""Ranks that have parts of every sample, as the trainer sees them: tokens of sequences, or rows of images.

What is cut, and what a pass must know of the whole, differs between the two; when it is asked for does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from weft.comm.objects import gather_values
from weft.errors import DataError
from weft.mesh import Mesh
from weft.training.divergence import checksum
from weft.training.trees import tensors_of

MakeWhole = Callable[[Sequence[int]], Tensor]


class Cutter(Protocol):
    """Where ranks have parts of every sample: tokens of sequences, or rows of images."""

    draws_alike: bool
    """Ranks of one sample draw the same random numbers, instead of each its own for its part."""

    def cut(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """This rank's part of a micro-batch."""

    def cut_inputs(self, inputs: Any) -> Any:
        """This rank's part of some inputs."""

    def shorten(self, inputs: Any, most: int) -> Any:
        """Smaller samples of the same kind, for a trial; None if there are too few to tell anything."""

    def part_of_output(self, output: Tensor, make: MakeWhole) -> Tensor:
        """This rank's part of something that is made in the shape which an output of the latest pass has in whole."""

    def part_of_whole(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole output of the latest pass."""

    def active(self) -> AbstractContextManager[None]:
        """Passes of the model happen in here."""

    def enter(self, inputs: Any) -> None:
        """A pass with these inputs begins, or its backward pass does."""

    def prepare(self, model: nn.Module) -> None:
        """Change the model itself, after all else has been done to it."""

    def weight(self, inputs: Any) -> int:
        """What a mean over this rank's part of a sample counts for, where means are over samples: its tokens."""

    def around(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """How the model is called."""


def require_same_batch(mesh: Mesh, inputs: Any, targets: Any, *, what: str = "batch") -> None:
    """Refuse ranks that are given different samples although they compute the same ones together; collective.

    Their answers would be those of no sample at all, and nobody would notice.
    """
    group = mesh.group("pipeline+ring+ulysses+tensor", "control")
    if group.size == 1:
        return
    mine = zlib.crc32(b"")
    for tensor in tensors_of((inputs, targets)):
        mine = zlib.crc32(checksum(tensor).cpu().numpy().tobytes(), mine)
        mine = zlib.crc32(repr(tuple(tensor.shape)).encode(), mine)
    seen = gather_values(mine, group, mesh.world.device)
    odd = [rank for rank, value in zip(group.ranks, seen, strict=True) if value != seen[0]]
    if odd:
        axes = ", ".join(f"{axis} = {size}" for axis, size in mesh.grid.axes.sizes.items() if size > 1)
        raise DataError(
            f"rank {', '.join(map(str, odd))} was given another {what} than rank {group.ranks[0]}, and they compute "
            f"one together ([axes] {axes}); split data by trainer.data_rank of trainer.data_size, as weft.batches "
            "does, not by rank"
        )
