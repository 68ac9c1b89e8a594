"""When each rank did what: the one record that simulation, tracing and drawing share.

`planning/simulate.py` foretells a timeline and `parallel/pipeline/executor.py` records one; because both are spans of
the same actions, they can be compared span by span and drawn side by side. Seconds count from any common zero: the
first span need not begin at 0, and only differences are ever used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from weft.plan.pipeline.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of one rank, from beginning to end."""

    rank: int
    """Along the pipeline axis."""
    action: Action
    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of all ranks; those of one rank are in the order in which it began them."""

    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def makespan_s(self) -> float:
        """From the first beginning to the last end, on any rank; 0 if nothing happened."""
        if not self.spans:
            return 0.0
        return max(span.stop_s for span in self.spans) - min(span.start_s for span in self.spans)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    def busy_s(self, rank: int) -> float:
        """Time that the rank computed; exchanges do not count, since they run beside it or keep it from computing."""
        return sum(span.duration_s for span in self.spans if span.rank == rank and span.action.is_compute)

    @property
    def utilisation(self) -> float:
        """Time computed by all ranks, over ranks × makespan; 0 if nothing happened."""
        available_s = self.num_ranks * self.makespan_s
        return sum(self.busy_s(rank) for rank in range(self.num_ranks)) / available_s if available_s else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Time not computed, over ranks × makespan: (p−1)/(m+p−1) for GPipe and 1F1B.

        Papers that state (p−1)/m divide by the time without any bubble instead.
        """
        return 1.0 - self.utilisation

    def as_rows(self) -> list[dict[str, Any]]:
        """One flat dict of plain values a span, for files and for sending between ranks."""
        return [
            {
                "rank": span.rank,
                **{field.name: getattr(span.action, field.name) for field in fields(Action)},
                "start_s": span.start_s,
                "stop_s": span.stop_s,
            }
            for span in self.spans
        ]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], *, num_ranks: int) -> Timeline:
        """The timeline whose `as_rows` these are; rows of several ranks may be chained."""
        spans = tuple(
            Span(
                rank=row["rank"],
                action=Action(**{field.name: row[field.name] for field in fields(Action)}),
                start_s=row["start_s"],
                stop_s=row["stop_s"],
            )
            for row in rows
        )
        return cls(spans=spans, num_ranks=num_ranks)
