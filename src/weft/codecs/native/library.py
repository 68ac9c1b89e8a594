"""The compiled C files of this folder, by name."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from weft.c_library import load_library


@functools.cache
def find_library(name: str) -> ctypes.CDLL | None:
    """The loops of NAME.c in this folder, built now if they never were; None without a compiler."""
    return load_library(Path(__file__).with_name(f"{name}.c"))
