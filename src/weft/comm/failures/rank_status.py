"""What a rank says about itself when ranks are asked who waits for whom."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from weft.comm.failures.activity import WAITING_CALLS, calls
from weft.comm.failures.places import Place, find_place, place_of_error
from weft.comm.failures.stuck_exchanges import ExchangeStatus, exchange_status


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The call, the exchanges and the place in the code of a rank."""

    exchanges: ExchangeStatus
    call: str = ""
    """The collective call of the public API that the rank is in; empty outside of weft."""
    call_s: float = 0.0
    """Seconds in that call."""
    num_calls: int = 0
    """Collective calls begun so far."""
    history: tuple[str, ...] = ()
    """The names of the latest ones, the last begun last."""
    place: Place = Place()
    has_ended: bool = False
    """The rank has ended normally."""

    def as_json(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**own, "exchanges": self.exchanges.as_json(), "place": asdict(self.place)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> RankStatus:
        changed = {
            "exchanges": ExchangeStatus.from_json(fields["exchanges"]),
            "history": tuple(fields["history"]),
            "place": Place(**fields["place"]),
        }
        return RankStatus(**{**fields, **changed})

    def call_number(self, number: int) -> str:
        """The name of a call by its number; empty if it is too long ago, or was not made."""
        place = number - self.num_calls - 1 + len(self.history)
        return self.history[place] if 0 <= place < len(self.history) else ""

    @property
    def is_waiting(self) -> bool:
        """True in an exchange, and in calls that wait for a disk or for ranks that are to come."""
        return bool(self.exchanges.waiting) or self.call in WAITING_CALLS

    @property
    def where(self) -> str:
        """The call and the place: "in trainer.save (train.py:31)"."""
        user, inner = self.place.user, self.place.inner
        if self.has_ended:
            return f"has ended normally, after {self.num_calls:,} collective calls"
        if self.place.in_debugger:
            return f"in a debugger at {user or inner}"
        if self.call:
            at = f" ({self.place.line})" if user else ""
            busy = f", at {inner}" if inner and not self.exchanges.waiting else ""
            return f"in {self.call}{at}{busy}"
        at = " in ".join(filter(None, (inner if user else "", user or inner)))
        return f"at {at}" if at else ""


def failed_status(error: BaseException) -> RankStatus:
    """The status of this rank after an error that it did not catch."""
    return replace(own_status(), place=place_of_error(error), exchanges=ExchangeStatus(waiting=(), latest={}))


def own_status(*, has_ended: bool = False, reads_recorder: bool = True) -> RankStatus:
    """The status of this rank, now. Reading torch's recorder takes up to half a second of Python's lock, and queries
    CUDA events, which a graph that is being captured does not survive."""
    name = calls.name
    return RankStatus(
        exchanges=ExchangeStatus(waiting=(), latest={})
        if has_ended
        else exchange_status(reads_recorder=reads_recorder),
        call=name,
        call_s=time.perf_counter() - calls.since_s if name else 0.0,
        num_calls=calls.number,
        history=tuple(calls.history),
        place=Place() if has_ended else find_place(calls.thread if name else None),
        has_ended=has_ended,
    )
