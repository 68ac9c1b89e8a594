"""The lengths of the factors that powersgd sends: rank × (rows + columns) elements instead of rows × columns.

first message     the left factors of all tensors, rank × rows, then the elements that fill no row, as they are
second message    the right factors of all tensors, rank × columns
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.plan import Codec


def rank_of(codec: Codec, tensor: CodedTensor) -> int:
    """The rank of a tensor's factors: the plan's, or the matrix's own if that is less; 0 if no row of it is here."""
    return min(codec.rank, tensor.num_rows, tensor.num_columns)


def message_numels(codec: Codec, tensors: Sequence[CodedTensor]) -> tuple[int, int]:
    """Elements of both messages of these tensors. Where no full row is here the second is empty, and still sent: ranks
    that share a bucket go through the same phases, whatever their slices of it are."""
    first = sum(rank_of(codec, one) * one.num_rows + one.num_rest for one in tensors)
    return first, sum(rank_of(codec, one) * one.num_columns for one in tensors)
