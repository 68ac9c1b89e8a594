"""Errors under torchrun are printed once, by one rank.

Ranks that `launch.py` starts leave their errors to the parent; under torchrun weft has no parent process, so the watch
that ranks keep over each other says whose error came first. Before they have met, all have the same one, and rank 0
prints it.
"""

from __future__ import annotations

import sys

from weft.cli.terminal import is_first_rank


def reports_first(error: Exception) -> bool:
    """True on the rank that prints an error that ends it."""
    if "weft.comm.failures.watch" not in sys.modules:  # then ranks have not met, and importing torch takes seconds
        return is_first_rank()
    from weft.comm.failures import watch

    if not watch.is_watched():
        return is_first_rank()
    is_first = watch.report(error)
    watch.force_exit_if_stuck()
    return is_first
