"""Who prints an error where torchrun started the ranks: one of them, once.

Ranks that `launch.py` starts leave their errors for the parent; under torchrun there is no parent of ours, so ranks ask
the store they share. The first with an error prints it; one that lost its connection because of that keeps quiet.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from weft.launch import PEER_ERROR_WAIT_S

_REPORTED = "weft/reported"


def reports_first() -> bool:
    """Whether this rank is the one to print an error: the first that has one, where ranks can ask each other."""
    store = _store()
    if store is None:
        return os.environ.get("RANK", "0") == "0"
    return bool(store.add(_REPORTED, 1) == 1)


def peer_reported() -> bool:
    """For a rank that lost its connection: whether a peer left because of a user's mistake, which it has printed."""
    store, deadline = _store(), time.monotonic() + PEER_ERROR_WAIT_S
    while store is not None and time.monotonic() < deadline:
        if store.add(_REPORTED, 0) > 0:
            return True
        time.sleep(0.05)
    return False


def _store() -> Any:
    if "torch" not in sys.modules:  # then there is no group either, and importing it takes seconds
        return None
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store() if dist.is_initialized() else None
