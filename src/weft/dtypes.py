"""Floating-point types of 16 bits, and the wider type in which they are summed."""

from __future__ import annotations

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which many terms of a dtype are added up, as torch does inside its kernels."""
    return torch.float32 if dtype in HALF_DTYPES else dtype
