"""Calls of the loops in `sparse.c`, for topk and dgc."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from weft.codecs.native.library import find_library

_NAMES = {torch.float32: "float", torch.float64: "double"}
_BLOCK = 1024
_SLACK = 32
"""Room for a block's candidates and a vector more."""


class _Job(ctypes.Structure):
    """`Job` of sparse.c."""

    _fields_ = (
        ("numel", ctypes.c_int64),
        ("num_sent", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("old_residual", ctypes.c_void_p),
        ("old_momentum", ctypes.c_void_p),
        ("new_residual", ctypes.c_void_p),
        ("new_momentum", ctypes.c_void_p),
        ("keep_residual", ctypes.c_double),
        ("keep_momentum", ctypes.c_double),
        ("momentum", ctypes.c_double),
        ("is_nesterov", ctypes.c_int32),
        ("is_masking", ctypes.c_int32),
        ("is_exact", ctypes.c_int32),
        ("sample_start", ctypes.c_int64),
        ("sample_stride", ctypes.c_int64),
        ("num_sampled", ctypes.c_int64),
        ("sample_rank", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("sent", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("candidate_offsets", ctypes.c_void_p),
        ("candidates", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
    )


class Loops:
    """The compiled loops, for dense host tensors of float32 or float64."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._choose, self._add = {}, {}
        for dtype, name in _NAMES.items():
            self._choose[dtype] = choose = getattr(library, f"weft_sparse_choose_{name}")
            choose.argtypes, choose.restype = (ctypes.POINTER(_Job),), ctypes.c_int
            self._add[dtype] = add = getattr(library, f"weft_sparse_add_{name}")
            add.argtypes = (
                ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
                ctypes.c_int64, ctypes.c_double, ctypes.c_int,
            )  # fmt: skip
            add.restype = None

    def choose(
        self,
        values: torch.Tensor,
        *,
        residual: tuple[torch.Tensor, torch.Tensor],
        keep_residual: float,
        momentum: tuple[torch.Tensor, torch.Tensor] | None = None,
        keep_momentum: float = 1.0,
        nesterov: float | None = None,
        is_masking: bool = False,
        is_exact: bool = False,
        sample: tuple[int, int, int],
        rank: int,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        sent: torch.Tensor,
    ) -> bool:
        """Add the values to what was kept, choose what is sent, and clear that in the new state; True if something is
        not finite. State is given as (old, new).

        `keep_residual`, `keep_momentum`: factors on the old state; `nesterov`: on the new momentum, where that is
        Nesterov's. `sample`: first element, distance and number of those from which the threshold is estimated: the
        `rank`-th largest. `is_exact`: send the largest, even if fewer reach the threshold than there is room for.
        """
        numel, num_sent, item_bytes = values.numel(), sent.numel(), values.element_size()
        start, stride, num_sampled = sample
        expected = max(num_sent, rank * stride)
        capacity = min(expected + expected // 4 + 2 * _BLOCK, numel) + _BLOCK + _SLACK
        num_sizes = max(capacity, num_sampled)
        # offsets last: they need the least alignment
        scratch = torch.empty(capacity * (item_bytes + 2) + num_sizes * item_bytes, dtype=torch.uint8)
        sizes = scratch.data_ptr()
        candidates = sizes + num_sizes * item_bytes
        job = _Job(
            numel=numel,
            num_sent=num_sent,
            values=_address(values),
            old_residual=_address(residual[0]),
            new_residual=_address(residual[1]),
            old_momentum=None if momentum is None else _address(momentum[0]),
            new_momentum=None if momentum is None else _address(momentum[1]),
            keep_residual=keep_residual,
            keep_momentum=keep_momentum,
            momentum=nesterov or 0.0,
            is_nesterov=nesterov is not None,
            is_masking=is_masking,
            is_exact=is_exact,
            sample_start=start,
            sample_stride=stride,
            num_sampled=num_sampled,
            sample_rank=rank,
            counts=_address(counts),
            offsets=_address(offsets),
            sent=_address(sent),
            capacity=capacity,
            candidate_offsets=candidates + capacity * item_bytes,
            candidates=candidates,
            sizes=sizes,
        )
        return bool(self._choose[values.dtype](ctypes.byref(job)))

    def add(
        self,
        target: torch.Tensor,
        *,
        counts: Sequence[torch.Tensor],
        offsets: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        scale: float,
        is_fresh: bool,
    ) -> None:
        """target += scale × the entries of several messages; or, if it `is_fresh`, becomes that."""
        self._add[target.dtype](
            _address(target),
            target.numel(),
            len(values),
            _addresses(counts),
            _addresses(offsets),
            _addresses(values),
            values[0].numel(),
            scale,
            is_fresh,
        )


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(_address(tensor) for tensor in tensors))


def _address(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous(), "loops over addresses need dense tensors"
    return tensor.data_ptr()


@functools.cache
def find_loops() -> Loops | None:
    """The compiled loops; None without a compiler."""
    library = find_library("sparse")
    return None if library is None else Loops(library)
