"""One thing that goes on in a thread of its own while the others compute, and what it changes meanwhile.

Used for weights that arrive while the next forward pass has begun: it needs some of them, and waits for no more. The
thread also answers servers that were lost and have come back, which the ranks of one worker could not do for each other
while they wait in an exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread, and a lock for what it changes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held while something changes; whoever changes it notifies all."""
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-weights")
        self._work: Future[None] | None = None
        self._is_busy = False

    def start(self, work: Callable[[], None]) -> None:
        """Do something in the thread, after what was started before."""
        self.wait()
        self._is_busy = True
        self._work = self._threads.submit(self._do, work)

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Return when this is true, or nothing more is done; raises what ended it."""
        with self.changed:
            self.changed.wait_for(lambda: not self._is_busy or is_done())
        if not self._is_busy:
            self.wait()

    def wait(self) -> None:
        """Return when nothing more is done; raises what ended it, to everybody who waits for it."""
        if self._work is not None:
            self._work.result()

    def close(self) -> None:
        """The thread ends, with what it does."""
        self._threads.shutdown()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self.changed:
                self._is_busy = False
                self.changed.notify_all()
