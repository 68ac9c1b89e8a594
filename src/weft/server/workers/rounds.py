"""Synchronous updates: which workers' gradients make up each version of the weights.

    version 3   worker 0 ✓   worker 1 ✓   worker 2 ✓   worker 3 …        backups = 1: the update is made of 0, 1 and 2
    version 4   worker 3's gradient of version 3 arrives: dropped, by its version

A gradient belongs to the version it was computed from, which is its worker's clock: a late one can never enter the next
update. Workers that leave in a round count if they had sent all of it; those that join count from the next round on.
"""

from __future__ import annotations

from collections.abc import Iterable


class Rounds:
    """The members of a synchronous run, and how far they are with the next update."""

    def __init__(self, *, backups: int = 0, version: int = 0) -> None:
        self.backups, self.version = backups, version
        self._current: set[int] = set()
        self._joining: set[int] = set()
        self._complete: dict[int, None] = {}

    @property
    def current(self) -> tuple[int, ...]:
        """The workers of this round, which share its batch."""
        return tuple(sorted(self._current))

    @property
    def completed(self) -> tuple[int, ...]:
        """Workers that have sent all of this round, in the order in which they had."""
        return tuple(self._complete)

    def join(self, worker: int) -> None:
        """A worker takes part when the next round begins."""
        self._joining.add(worker)

    def go_on(self, version: int, members: Iterable[int]) -> None:
        """Begin in the middle of a run."""
        self.version, self._current = version, set(members)

    def leave(self, worker: int) -> None:
        """A worker is gone; what it has sent of this round counts if it is complete."""
        self._current.discard(worker)
        self._joining.discard(worker)

    def begin_if_empty(self) -> bool:
        """Let those that have joined take part in this round, if nobody does; True if somebody takes part by that."""
        if self._current or self._complete or not self._joining:
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        self._current |= self._joining
        self._joining = set()

    def complete(self, worker: int) -> None:
        """All of a worker's gradients of this version are there."""
        self._complete[worker] = None

    @property
    def chosen(self) -> tuple[int, ...]:
        """The workers of the update, in the order in which they are added up; none until enough are complete."""
        needed = max(len(self._current | set(self._complete)) - self.backups, 1)
        if len(self._complete) < needed:
            return ()
        return tuple(sorted(self.completed[:needed]))

    def advance(self) -> None:
        """The update was made, and the next round begins."""
        self.version += 1
        self._complete = {}
        self._begin()
