"""Where in the program something was called."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_PASSED_THROUGH = ("contextlib", "/weft/comm/")


def calling_site() -> str:
    """The innermost three lines of the program above torch, weft's own exchanges and this package."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 3:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH)) and not any(part in file for part in _PASSED_THROUGH):
            found.append(f"{os.path.basename(file)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
