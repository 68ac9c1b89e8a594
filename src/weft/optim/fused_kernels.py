"""Finds the Triton kernels of LARS and LAMB, where they work."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.optim.layerwise_triton import Kernels

log = logging.getLogger("weft")


@functools.cache
def find_kernels() -> Callable[[], Kernels] | None:
    """What makes the kernels' tables for a batch; None without Triton or a device it can compile for."""
    try:
        from weft.optim.layerwise_triton import Kernels, try_kernels

        try_kernels()
    except Exception as error:
        if torch.cuda.is_available():
            log.info("LARS and LAMB update by torch's functions, without Triton (%r)", error)
        return None
    return Kernels
