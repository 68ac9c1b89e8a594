"""Hides communication from TorchDispatchModes.

A policy of recomputation, say, expects the same operators in the second run as in the first; a transport that makes a
view of its memory once, and keeps it, has others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING = nullcontext()


def hide_from_modes() -> AbstractContextManager[object]:
    """Context in which no mode sees operators; costs nothing where there is none."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING
