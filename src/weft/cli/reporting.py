"""Errors under torchrun are printed once, by one rank.

Ranks that `launch.py` starts leave their errors to the parent; under torchrun weft has no parent process, so ranks use
the store they share. The first with an error prints it; one that lost its connection because of that prints nothing.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from weft.cli.terminal import is_first_rank
from weft.launch import PEER_ERROR_WAIT_S

_REPORTED = "weft/reported"


def reports_first() -> bool:
    """True on the rank that prints an error: the first that has one, or rank 0 where ranks share no store."""
    store = _store()
    if store is None:
        return is_first_rank()
    return bool(store.add(_REPORTED, 1) == 1)


def peer_reported() -> bool:
    """True if a peer has printed an error of the user, and the connection to it was lost because of that."""
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
