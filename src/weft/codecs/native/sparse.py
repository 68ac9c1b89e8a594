"""Calls of the loops in `sparse.c`, for topk and dgc: one per bucket, however many tensors are in it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from weft.codecs.native.library import find_library

Numbers = ctypes.Array[ctypes.c_int64]
"""Rows of numbers, one per tensor."""

_NAMES = {torch.float32: "float", torch.float64: "double"}
_BLOCK = 1024
_SLACK = 32
"""Room for a block's candidates and a vector more."""


class _Bucket(ctypes.Structure):
    """`Bucket` of sparse.c."""

    _fields_ = (
        ("num_tensors", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("samples", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("old_residual", ctypes.c_void_p),
        ("old_momentum", ctypes.c_void_p),
        ("new_residual", ctypes.c_void_p),
        ("new_momentum", ctypes.c_void_p),
        ("is_masking", ctypes.c_int32),
        ("is_exact", ctypes.c_int32),
        ("counts", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("candidate_offsets", ctypes.c_void_p),
        ("candidates", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
    )


class Loops:
    """The compiled loops, for dense host tensors of float32 or float64. `places` of tensors are rows of (first element
    in the flat buffer, number of elements, first entry in the message, number of entries, first chunk)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        real = ctypes.c_double
        self._choose = _functions(library, "choose", (ctypes.POINTER(_Bucket),), whole)
        kinds = (pointer, number, pointer, number, pointer, pointer, pointer, pointer, real, whole)
        self._add = _functions(library, "add", kinds)
        self._round = _functions(library, "round", (pointer, number, whole, pointer, pointer, pointer, pointer))
        self._expand = _functions(library, "expand", (pointer, number, whole, pointer, pointer, pointer))

    def choose(
        self,
        values: torch.Tensor,
        *,
        places: Numbers,
        samples: Sequence[tuple[int, int, int, int]],
        factors: Sequence[tuple[float, float, float, bool]],
        residual: tuple[torch.Tensor, torch.Tensor],
        momentum: tuple[torch.Tensor, torch.Tensor] | None,
        is_masking: bool,
        is_exact: bool,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        row: torch.Tensor,
    ) -> bool:
        """Add the values to what was kept, choose what is sent, and clear that in the new state; True if something is
        not finite. State is given as (old, new).

        `samples`: from which elements a tensor's threshold is estimated, as (first, distance, number, rank of the
        threshold among them). `factors`: on the old residual, on the old momentum, and, where it is Nesterov's, on the
        new one. `is_exact`: send the largest, even if fewer reach the threshold than there is room for.
        """
        item_bytes = values.element_size()
        capacity = max(map(_num_candidates, _rows(places), samples), default=0)
        num_sizes = max([capacity, *(sample[2] for sample in samples)])
        # offsets last: they need the least alignment
        scratch = torch.empty(capacity * (item_bytes + 2) + num_sizes * item_bytes, dtype=torch.uint8)
        sizes = scratch.data_ptr()
        candidates = sizes + num_sizes * item_bytes
        sampled, given = numbers(samples), [number for row in factors for number in row]
        all_factors = (ctypes.c_double * len(given))(*given)
        bucket = _Bucket(
            num_tensors=len(samples),
            places=ctypes.addressof(places),
            samples=ctypes.addressof(sampled),
            factors=ctypes.addressof(all_factors),
            values=_address(values),
            old_residual=_address(residual[0]),
            new_residual=_address(residual[1]),
            old_momentum=None if momentum is None else _address(momentum[0]),
            new_momentum=None if momentum is None else _address(momentum[1]),
            is_masking=is_masking,
            is_exact=is_exact,
            counts=_address(counts),
            offsets=_address(offsets),
            row=_address(row),
            capacity=capacity,
            candidate_offsets=candidates + capacity * item_bytes,
            candidates=candidates,
            sizes=sizes,
        )
        return bool(self._choose[values.dtype](ctypes.byref(bucket)))

    def add(
        self,
        target: torch.Tensor,
        *,
        places: Numbers,
        counts: Sequence[torch.Tensor],
        offsets: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        scale: float,
        is_fresh: bool,
    ) -> None:
        """target += scale × the entries of several messages; or, if it `is_fresh`, its tensors become that."""
        self._add[target.dtype](
            places,
            _num_tensors(places),
            _address(target),
            len(rows),
            _addresses(counts),
            _addresses(offsets),
            _addresses(rows),
            (ctypes.c_int64 * len(rows))(),
            scale,
            is_fresh,
        )

    def round(
        self,
        row: torch.Tensor,
        *,
        places: Numbers,
        bits: int,
        counts: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Round entries to few bits; the row ends as what that took from them. `codes` are zero before."""
        self._round[row.dtype](
            places, _num_tensors(places), bits, _address(counts), _address(row), _address(codes), _address(scales)
        )

    def expand(
        self, row: torch.Tensor, *, places: Numbers, bits: int, codes: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Write the values of rounded entries into the row."""
        self._expand[row.dtype](places, _num_tensors(places), bits, _address(codes), _address(scales), _address(row))


@functools.cache
def find_loops() -> Loops | None:
    """The compiled loops; None without a compiler."""
    library = find_library("sparse")
    return None if library is None else Loops(library)


def numbers(rows: Sequence[Sequence[int]]) -> Numbers:
    """Rows of numbers as the loops take them."""
    flat = [number for row in rows for number in row]
    return (ctypes.c_int64 * len(flat))(*flat)


_PLACE_LENGTH = 5


def _rows(places: Numbers) -> list[list[int]]:
    flat = list(places)
    return [flat[start : start + _PLACE_LENGTH] for start in range(0, len(flat), _PLACE_LENGTH)]


def _num_tensors(places: Numbers) -> int:
    return len(places) // _PLACE_LENGTH


def _num_candidates(place: Sequence[int], sample: Sequence[int]) -> int:
    """Room for what will most likely reach the threshold; if it is too little, the least of them are dropped."""
    (_, numel, _, num_entries, _), (_, distance, _, rank) = place, sample
    expected = max(num_entries, rank * distance)
    return min(expected + expected // 4 + 2 * _BLOCK, numel) + _BLOCK + _SLACK


def _functions(
    library: ctypes.CDLL, name: str, kinds: tuple[type, ...], result: type | None = None
) -> dict[torch.dtype, ctypes._NamedFuncPointer]:
    found = {}
    for dtype, ending in _NAMES.items():
        found[dtype] = function = getattr(library, f"weft_sparse_{name}_{ending}")
        function.argtypes, function.restype = kinds, result
    return found


def _address(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous(), "loops over addresses need dense tensors"
    return tensor.data_ptr()


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(_address(tensor) for tensor in tensors))
