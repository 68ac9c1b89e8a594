"""Bounded staleness: a worker begins a clock only while it is at most `staleness` clocks ahead of the slowest.

A worker's clock is the number of steps it has finished. It may begin clock c if c - min over workers <= staleness: with
a bound of 0 all begin together, and without one (None) nobody waits. Published bounds differ by one; here the gap
itself is bounded. So weights that a worker gets for clock c hold all updates of clocks below c - staleness.
"""

from __future__ import annotations


class Clocks:
    """The clocks of all workers of a run."""

    def __init__(self, staleness: int | None) -> None:
        self.staleness = staleness
        self._clocks: dict[int, int] = {}
        self._slowest: int | None = None
        """The least of them; None where it has to be looked for, among hundreds."""
        self.largest_gap = 0
        """Clocks that a worker was ahead of the slowest when it was let go, at most so far."""

    @property
    def slowest(self) -> int:
        """The clock of the slowest worker; 0 without workers."""
        if self._slowest is None:
            self._slowest = min(self._clocks.values(), default=0)
        return self._slowest

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that take part, in order."""
        return tuple(sorted(self._clocks))

    def __contains__(self, worker: object) -> bool:
        return worker in self._clocks

    def join(self, worker: int, clock: int) -> None:
        """A worker takes part from this clock on."""
        self._clocks[worker], self._slowest = clock, None

    def leave(self, worker: int) -> None:
        """Nobody waits for this worker any more."""
        self._clocks.pop(worker, None)
        self._slowest = None

    def finish(self, worker: int, clock: int) -> None:
        """A worker's gradients of a clock are applied."""
        self._clocks[worker], self._slowest = clock + 1, None

    def may_begin(self, worker: int) -> bool:
        """True if a worker may begin its next clock, and does."""
        gap = self._clocks[worker] - self.slowest
        if self.staleness is not None and gap > self.staleness:
            return False
        self.largest_gap = max(self.largest_gap, gap)
        return True
