"""Calls of the loops in `quantised.c`, for onebit, sign, qsgd and terngrad."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_double, c_float, c_int, c_size_t, c_uint32, c_void_p
from typing import Any

import torch

from weft.codecs.native.library import find_library
from weft.plan.exchange.quantised import QSGD_BLOCK, QuantisedTensor, onebit_rows

_NAMES = {torch.float32: "float", torch.float64: "double"}
_REALS: dict[str, Any] = {"float": c_float, "double": c_double}


class Loops:
    """The compiled loops, for dense host tensors of one dtype. Each call is of one tensor, and of its whole message."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        real = _REALS[name]
        arguments = {
            "onebit": (c_void_p, c_void_p, real, c_void_p, *[c_size_t] * 3, c_void_p, c_void_p),
            "sign": (c_void_p, c_size_t, c_void_p),
            "qsgd": (c_void_p, c_size_t, c_int, c_uint32, c_uint32, c_void_p, c_void_p),
            "terngrad": (c_void_p, c_size_t, c_uint32, c_uint32, c_void_p, c_void_p),
            "onebit_sum": (c_void_p, *[c_size_t] * 5, c_void_p, real),
            "sign_sum": (c_void_p, *[c_size_t] * 3, c_void_p),
            "steps_sum": (c_void_p, *[c_size_t] * 3, c_int, c_int, c_size_t, c_size_t, c_void_p, real),
        }
        self._call: dict[str, Any] = {}
        for function, types in arguments.items():
            self._call[function] = found = getattr(library, f"weft_{function}_{name}")
            found.argtypes = types
            found.restype = None if function.endswith("_sum") else c_int

    def encode(
        self, codec: str, part: QuantisedTensor, values: torch.Tensor, message: torch.Tensor, keys: tuple[int, int]
    ) -> bool:
        """Write the scales and codes of a tensor; False if an entry is not finite. Not for onebit."""
        given, start = values.data_ptr(), message.data_ptr()
        scales, codes = start + part.start, start + part.codes_start
        if codec == "sign":
            return not self._call[codec](given, part.num_coded, codes)
        bits = (part.bits,) if codec == "qsgd" else ()
        return not self._call[codec](given, part.num_coded, *bits, *keys, scales, codes)

    def encode_onebit(
        self, part: QuantisedTensor, values: torch.Tensor, old: torch.Tensor, factor: float, new: torch.Tensor,
        message: torch.Tensor,
    ) -> bool:  # fmt: skip
        """Write the means, rest and signs of values + old × factor, and what was not sent into `new`."""
        one, start = part.tensor, message.data_ptr()
        return not self._call["onebit"](
            values.data_ptr(), old.data_ptr(), factor, new.data_ptr(), onebit_rows(one), one.num_columns, part.num_rest,
            start + part.start, start + part.codes_start,
        )  # fmt: skip

    def add(
        self, codec: str, part: QuantisedTensor, received: torch.Tensor, target: torch.Tensor, scale: float
    ) -> None:
        """Write the sum of what was received into a tensor's values, or the majority of signs."""
        one, to = part.tensor, target.data_ptr()
        rows = (received.data_ptr() + part.start, received.shape[0], received.stride(0))
        if codec == "onebit":
            self._call["onebit_sum"](*rows, onebit_rows(one), one.num_columns, part.num_rest, to, scale)
        elif codec == "sign":
            self._call["sign_sum"](*rows, part.num_coded, to)
        else:
            num_steps, per_scale = 2**part.bits // 2 - 1, QSGD_BLOCK if codec == "qsgd" else part.num_coded
            codes_at = part.codes_start - part.start
            self._call["steps_sum"](*rows, part.num_coded, part.bits, num_steps, per_scale, codes_at, to, scale)


@functools.cache
def find_loops(dtype: torch.dtype) -> Loops | None:
    """The compiled loops for values of this dtype, built now if they never were; None without a compiler."""
    library = find_library("quantised")
    return None if library is None else Loops(library, _NAMES[dtype])
