"""Exchanges that go on after the step that began them: a process waits for its own before it leaves the others.

A script may end with a step, without `trainer.close()`. Other ranks may still need what this one has begun to send.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import sys
import weakref
from typing import Protocol

log = logging.getLogger("weft")


class Waitable(Protocol):
    def wait(self) -> None:
        """Return when nothing is under way; at once if nothing is."""


_all: weakref.WeakSet[Waitable] = weakref.WeakSet()
_registered: list[object] = []


def wait_before_leaving(one: Waitable) -> None:
    """Let this process wait for something before it leaves the others, unless an error ends it."""
    if not _registered:  # after the failure watch, so that it is still on guard: what was registered last runs first
        atexit.register(_wait_at_exit)
        _registered.append(multiprocessing.util.Finalize(None, _wait_at_exit, exitpriority=10))  # forks skip atexit
    _all.add(one)


def wait_for_all() -> None:
    for one in list(_all):
        one.wait()


def _wait_at_exit() -> None:
    if sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None:
        return
    try:
        wait_for_all()
    except Exception as error:  # the others have gone, or their group has
        log.debug("at the end of this process: %s", error)
