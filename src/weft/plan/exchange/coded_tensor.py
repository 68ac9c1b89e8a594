"""The tensors that a codec compresses: which ones, and the part of each that a rank exchanges.

Biases, norms and other small tensors travel as they are, together: they are a thousandth of the bytes, and what a codec
would lose of them is worth more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.plan.plan import Codec

FEW_ROWS = 2
"""So few rows of a matrix are no more than onebit's two means per column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedTensor:
    """A tensor in a flat buffer of values, or a range of its elements, that a codec compresses by itself.

    Codecs treat every tensor separately, so what is sent does not depend on which tensors share a bucket.
    """

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor that this rank has a range of; two dims or more."""
    offset: int
    """Place of its first element here in the flat buffer of values. There may be gaps between tensors."""
    numel: int
    """Elements that are here: all, or under ZeRO and between hosts a range of the flattened tensor."""
    start: int = 0
    """The first of them in the flattened tensor."""

    @property
    def num_columns(self) -> int:
        """Columns of the matrix that the tensor is: its first dim are the rows, all others together the columns."""
        return math.prod(self.shape[1:])

    @property
    def num_rows(self) -> int:
        """Full rows of the elements that are here, counted from the first of them. In a range of a tensor they may
        begin in the middle of one of its own rows."""
        return self.numel // self.num_columns

    @property
    def num_rest(self) -> int:
        """Elements at the end that fill no row."""
        return self.numel % self.num_columns


def is_coded(codec: Codec, shape: Sequence[int]) -> bool:
    """True if a tensor of this shape (a rank's shard of it) is compressed."""
    if codec.name == "half":  # it loses little enough for every tensor
        return True
    if codec.name == "none" or len(shape) < 2 or math.prod(shape) < codec.dense_below:
        return False
    if codec.name == "powersgd":  # factors that are no smaller than the matrix would only cost time
        rows, columns = shape[0], math.prod(shape[1:])
        return codec.rank * (rows + columns) < rows * columns
    return codec.name != "onebit" or shape[0] > FEW_ROWS


def coded_tensors(
    named: Sequence[tuple[str, tuple[int, ...], int] | tuple[str, tuple[int, ...], int, int]],
) -> tuple[CodedTensor, ...]:
    """Tensors (name, shape, number of elements here, the first of them unless it is 0) one after the other; empty ones
    are left out."""
    found, offset = [], 0
    for name, shape, numel, *start in named:
        if numel:
            found.append(CodedTensor(name=name, shape=shape, offset=offset, numel=numel, start=sum(start)))
        offset += numel
    return tuple(found)


def slice_of(tensors: Sequence[CodedTensor], start: int, stop: int) -> tuple[CodedTensor, ...]:
    """The parts of tensors that lie in a slice of their flat buffer, placed in the slice."""
    found = []
    for one in tensors:
        first, last = max(one.offset, start), min(one.offset + one.numel, stop)
        if first < last:
            found.append(replace(one, offset=first - start, numel=last - first, start=one.start + first - one.offset))
    return tuple(found)
