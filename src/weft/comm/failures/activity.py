"""What this rank is doing: the collective call of the public API that it is in, and the exchanges it waits in.

The threads that work write it down without a lock or a system call, 0.1 µs per exchange; each value has one writer. The
watch reads it from its own thread, and may see an exchange that ended a moment ago, which does no harm: it looks for
waits of seconds. The numbers of calls and exchanges are the same on all ranks as long as the ranks are in step.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

What = tuple[str, int, int, tuple[int, ...]]
"""An exchange: its kind, bytes and number, and the ranks that it waits for; none: all of its group."""
STEP = "trainer.step"
CHECKPOINT_CALLS = ("trainer.save", "trainer.load")
WAITING_CALLS = (*CHECKPOINT_CALLS, "weft.parallelize")
"""Calls that also wait for disks, or for ranks through the store."""
_KEPT = 16
_MOST_HISTORY = 128
_MIN_STEPS = 3


class ExchangeRecord:
    """The exchanges of one process group on this rank."""

    __slots__ = ("__weakref__", "begun", "group", "name", "ranks", "since_s", "waiting")

    def __init__(self, group: str = "", name: str = "", ranks: tuple[int, ...] = ()) -> None:
        """`group`: torch's name of the group, the same on all its ranks; `name`: what it is for."""
        self.group = group
        self.name = name
        self.ranks = ranks
        self.begun = 0
        """Exchanges begun so far."""
        self.waiting: What | None = None
        """The exchange that a thread of this rank waits in."""
        self.since_s = 0.0
        """When that wait began (`time.perf_counter`)."""


_records: list[weakref.ref[ExchangeRecord]] = []


def record_exchanges(group: str, name: str, ranks: tuple[int, ...]) -> ExchangeRecord:
    """A record that the watch looks at, until nothing refers to it any more."""
    record = ExchangeRecord(group, name, ranks)
    _records[:] = [one for one in _records if one() is not None] + [weakref.ref(record)]
    return record


def exchange_records() -> Iterator[ExchangeRecord]:
    for reference in tuple(_records):
        if (record := reference()) is not None:
            yield record


class Calls:
    """The collective calls of this process, in order. Calls inside of a call are part of it."""

    def __init__(self) -> None:
        self.number = 0
        """Calls begun so far."""
        self.name = ""
        """The call that this process is in; empty outside of weft."""
        self.since_s = 0.0
        self.thread = 0
        self.history: deque[str] = deque(maxlen=_MOST_HISTORY)
        """The names of the latest calls, the present one last."""
        self._durations_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._last_step_s = 0.0

    def enter(self, name: str) -> None:
        self.since_s = time.perf_counter()
        self.thread = threading.get_ident()
        self.number += 1
        self.history.append(name)
        self.name = name

    def leave(self) -> None:
        """A step's duration is the time since the last one ended: whoever waits for a rank waits for its data too."""
        name, now = self.name, time.perf_counter()
        self.name = ""
        if name == STEP:
            if self._last_step_s:
                self._durations_s[name].append(now - self._last_step_s)
            self._last_step_s = now
        else:
            self._durations_s[name].append(now - self.since_s)

    def forget_durations(self) -> None:
        """Another model, or another plan: its steps take another time."""
        self._durations_s.clear()
        self._last_step_s = 0.0

    def usual_s(self, name: str) -> float | None:
        """The usual duration of a call; None as long as none is known. The first steps do not count: they compile,
        allocate and measure."""
        known = list(self._durations_s.get(name, ()))
        return statistics.median(known) if len(known) >= (_MIN_STEPS if name == STEP else 1) else None


calls = Calls()


def collective_call(name: str) -> Callable[[Callable[Given, Returned]], Callable[Given, Returned]]:
    """Decorator of a public call that all ranks must make; methods of something that has a mesh, or functions."""

    def decorate(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
        @functools.wraps(function)
        def recorded(*given: Given.args, **named: Given.kwargs) -> Returned:
            if calls.name or (given and _is_alone(given[0])):
                return function(*given, **named)
            calls.enter(name)
            try:
                return function(*given, **named)
            finally:
                calls.leave()

        return cast(Callable[Given, Returned], recorded)

    return decorate


def _is_alone(owner: Any) -> bool:
    """True for a trainer of one rank, which may be used on some ranks only."""
    mesh = getattr(owner, "mesh", None)
    return mesh is not None and mesh.world.size == 1
