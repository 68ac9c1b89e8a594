"""Errors under torchrun are printed once, by one rank.

Ranks that `launch.py` starts leave their errors to the parent; under torchrun weft has no parent process, so the watch
that ranks keep over each other says whose error came first. Before they have met, all usually have the same one (a file
that is not there), and rank 0 prints it. Others wait a little first: if rank 0 ends, torchrun ends them before they
print, and if it does not, the error is theirs alone.
"""

from __future__ import annotations

import os
import sys
import time

from weft.cli.terminal import is_first_rank
from weft.errors import TURN_S


def reports_first(error: Exception) -> bool:
    """True on the rank that prints an error that ends it."""
    if "weft.comm.failures.watch" not in sys.modules:  # then ranks have not met, and importing torch takes seconds
        return _in_turn()
    from weft.comm.failures import watch

    if not watch.is_watched():
        return _in_turn()
    is_first = watch.report(error)
    watch.force_exit_if_stuck()
    return is_first


def _in_turn() -> bool:
    """True, on rank 0 at once, then on the first rank of every host, then on all others."""
    if not is_first_rank():
        time.sleep(TURN_S if os.environ.get("LOCAL_RANK", "0") == "0" else 2 * TURN_S)
    return True
