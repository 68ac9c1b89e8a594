"""The inner loops of `kernels.c`, compiled when first needed if there is a C compiler; everything works without."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from weft.c_library import load_library

LEAST_BYTES = 2**16
"""Below this size a call of torch costs less than checking the tensors."""
_SOURCE = Path(__file__).with_name("kernels.c")
_SUMS = {torch.float32: "weft_sum_float", torch.float64: "weft_sum_double"}


class Kernels:
    """The compiled loops, for tensors that are dense, on the host, and of one dtype and size."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._copy = library.weft_copy
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._copy.restype = None
        self._sums = {}
        for dtype, name in _SUMS.items():
            self._sums[dtype] = function = getattr(library, name)
            function.argtypes = (
                ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int,
            )  # fmt: skip
            function.restype = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    def sums(self, dtype: torch.dtype) -> bool:
        """True if `sum` is compiled for this dtype."""
        return dtype in self._sums

    def sum(self, targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor], *, add: bool = False) -> None:
        """Every target ends as the sum of two or more terms, or grows by it."""
        to, of = _addresses(targets), _addresses(terms)
        self._sums[terms[0].dtype](to, len(targets), of, len(terms), terms[0].numel(), add)


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """target.copy_(source), past the caches if both are dense and large: for what another process reads next."""
    is_large = target.nbytes >= LEAST_BYTES and target.dtype == source.dtype and target.shape == source.shape
    if is_large and _is_plain(target) and _is_plain(source):
        kernels = find_kernels()
        if kernels is not None:
            kernels.copy(target, source)
            return
    target.copy_(source)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a dense host tensor whose numbers are stored as they are, neither to be conjugated nor negated."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


@functools.cache
def find_kernels() -> Kernels | None:
    """The compiled loops, built now if they never were; None without a compiler."""
    library = load_library(_SOURCE)
    return None if library is None else Kernels(library)
