"""One background thread per group, which runs its exchanges in order.

It starts with the first exchange that is not waited for. One that is waited for at once runs in the caller's thread,
after those under way, which saves two changes of thread.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

CLOSE_TIMEOUT_S = 5.0
"""Seconds for exchanges under way to end when their group is closed."""


class Work:
    """A task under way. `wait` raises what it raised."""

    __slots__ = ("_done", "_error")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.release()

    def join(self) -> None:
        """Block until it is over, well or not."""
        with self._done:
            pass

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


Task = tuple[Callable[[], object], Work]


class Worker:
    """A queue of tasks and the thread that runs them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] | None = None
        self._last: Work | None = None
        self._lock = threading.Lock()
        self._broken: list[str] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], object]) -> None:
        """Run a task now, after all that were given before."""
        with self._lock:
            self._refuse_closed()
            if self._last is not None:
                self._last.join()  # its error is raised where it is waited for
                self._last = None
            _refuse(self._broken)
            try:
                with torch.no_grad():
                    task()
            except BaseException as error:
                _note(self._broken, error)
                raise

    def start(self, task: Callable[[], object]) -> Work:
        """Queue a task."""
        with self._lock:
            self._refuse_closed()
            if self._tasks is None:
                self._tasks = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=_run_tasks, args=(self._tasks, self._broken), name=self._name, daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._tasks.put, None).atexit = False
            self._last = work = Work()
            self._tasks.put((task, work))
        return work

    def close(self) -> None:
        """End the thread after its tasks; one whose peers never come is left to the end of the process."""
        with self._lock:
            self._is_closed = True
            if self._tasks is not None and self._thread is not None:
                self._tasks.put(None)
                self._thread.join(CLOSE_TIMEOUT_S)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("this process group is gone: its mesh was closed; make a new one")


def _run_tasks(tasks: queue.SimpleQueue[Task | None], broken: list[str]) -> None:
    torch.set_grad_enabled(False)  # it is a thread's own setting
    while (given := tasks.get()) is not None:
        task, work = given
        failure: BaseException | None = None
        try:
            _refuse(broken)
            task()
        except BaseException as error:
            _note(broken, error)
            failure = error
        del given, task  # what the task held must be free when the waiter continues
        work.finish(failure)
        del work, failure


def _note(broken: list[str], error: BaseException) -> None:
    """The first error only, and as text: the error itself would keep what its frames hold."""
    if not broken:
        broken.append(f"{type(error).__name__}: {error}")


def _refuse(broken: list[str]) -> None:
    """After an exchange that failed on this rank the others are at another point: one more would mix them up."""
    if broken:
        raise RuntimeError(f"this group is out of step, because an exchange failed before: {broken[0]}")
