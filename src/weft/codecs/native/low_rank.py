"""Calls of the loops in `low_rank.c`, for powersgd."""

from __future__ import annotations

import ctypes

import torch

_NAMES = {torch.float32: "float", torch.float64: "double"}
_POINTER, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS = {
    "encode": (_POINTER, _POINTER, _POINTER, _REAL, _POINTER, _POINTER, _POINTER),
    "decode": (_POINTER, _POINTER, _POINTER, _REAL, _REAL, _POINTER, _POINTER, _POINTER),
    "orthonormalise": (_POINTER, _INT, _INT, _INT, _REAL),
    "next_start": (_POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _REAL, _REAL),
}


class _Shape(ctypes.Structure):
    """`Shape` of low_rank.c."""

    _fields_ = (
        ("num_matrices", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("distance", ctypes.c_int64),
    )


class Loops:
    """The compiled loops, for host tensors of one type. Matrices are [matrix, row, column], dense but for the distance
    between them; factors are dense, [matrix, rank, row] on the left and [matrix, rank, column] on the right."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, *, negligible: float) -> None:
        """`negligible`: what is at most this part of a row is taken for rounding."""
        self._negligible = negligible
        calls = [getattr(library, f"weft_low_rank_{name}_{_NAMES[dtype]}") for name in _ARGUMENTS]
        for call, arguments in zip(calls, _ARGUMENTS.values(), strict=True):
            call.argtypes, call.restype = arguments, None
        self._encode, self._decode, self._orthonormalise, self._next_start = calls

    def encode(
        self,
        values: torch.Tensor,
        kept: torch.Tensor,
        keep: float | torch.Tensor,
        *,
        wanted: torch.Tensor,
        right: torch.Tensor,
        left: torch.Tensor,
    ) -> None:
        """wanted = values + keep · kept; left = right · wantedᵀ. `keep` is a number."""
        shape = _shape(values, kept, wanted, rank=right.shape[1])
        self._encode(shape, *_addresses(values, kept), float(keep), *_addresses(wanted, right, left))

    def decode(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        scale: float,
        share: float,
        values: torch.Tensor,
        wanted: torch.Tensor,
    ) -> None:
        """values = scale · leftᵀ · right; wanted -= share · leftᵀ · right."""
        shape, rank = _shape(values, wanted, rank=right.shape[1]), right.new_empty(right.shape[1])
        self._decode(shape, *_addresses(left, right), scale, share, *_addresses(values, wanted, rank))

    def orthonormalise_(self, rows: torch.Tensor) -> None:
        """Make the rows of each factor orthonormal, in place."""
        self._orthonormalise(*_addresses(rows), *rows.shape, self._negligible)

    def next_start(self, right: torch.Tensor, old: torch.Tensor, *, size: float, new: torch.Tensor) -> None:
        """new = right, scaled; rows that are negligible beside the largest stay as in `old`."""
        self._next_start(*_addresses(right, old, new), *right.shape, size, self._negligible)


def _shape(*matrices: torch.Tensor, rank: int) -> object:
    first = matrices[0]
    assert all(one.stride() == first.stride() for one in matrices) and first.stride()[1:] == (first.shape[2], 1)
    num_matrices, num_rows, num_columns = first.shape
    return ctypes.byref(_Shape(num_matrices, rank, num_rows, num_columns, first.stride(0)))


def _addresses(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
