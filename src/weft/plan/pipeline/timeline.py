"""The timeline of a pipeline: start and end of each action, the record that simulation, tracing and drawing share.

`planning/simulate.py` predicts a timeline and `parallel/pipeline/executor.py` records one, as spans of the same
actions, so that they can be compared span by span. Only differences of times are used, so any common zero will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.plan.pipeline.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of one rank with its start and end."""

    rank: int
    """Rank along the pipeline axis."""
    action: Action
    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of all ranks; those of one rank in the order of their starts."""

    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def makespan_s(self) -> float:
        """Time from the first start to the last end on any rank; 0 without spans."""
        if not self.spans:
            return 0.0
        return max(span.stop_s for span in self.spans) - min(span.start_s for span in self.spans)

    def busy_s(self, rank: int) -> float:
        """Time that the rank computed. Exchanges do not count: they overlap computation or delay it."""
        return sum(span.duration_s for span in self.spans if span.rank == rank and span.action.is_compute)

    @property
    def utilisation(self) -> float:
        """Compute time of all ranks, over ranks × makespan; 0 without spans."""
        available_s = self.num_ranks * self.makespan_s
        return sum(self.busy_s(rank) for rank in range(self.num_ranks)) / available_s if available_s else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks, over ranks × makespan: (p−1)/(m+p−1) for GPipe and 1F1B.

        Papers that state (p−1)/m divide by the time without any bubble instead.
        """
        return 1.0 - self.utilisation

    def as_rows(self) -> list[dict[str, Any]]:
        """One dict of plain values per span, for messages."""
        return [asdict(span) for span in self.spans]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], *, num_ranks: int) -> Timeline:
        """The timeline whose `as_rows` these are; rows of several ranks may be chained."""
        spans = (Span(**{**row, "action": Action(**row["action"])}) for row in rows)
        return cls(spans=tuple(spans), num_ranks=num_ranks)
