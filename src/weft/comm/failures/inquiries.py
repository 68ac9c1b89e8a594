"""The failure server's questions to all ranks when one of them has waited for long, and what is said then.

    look     a rank has waited some seconds: do ranks make different calls? If not, nothing is said
    late     it has waited longer than is usual: who waits for whom is reported, and again much later
    final    the wait is over its timeout: the same message ends the run

Looks are frequent where steps are long, so ranks are asked only what they note themselves (`own_status`); torch's
recorder is read when something may be reported.

A rank that does not answer is the likeliest cause: it was stopped, its host is gone, or its code holds Python's
global lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weft.comm.failures.hang_report import describe_different_calls, describe_wait
from weft.comm.failures.limits import Limits
from weft.comm.failures.rank_status import RankStatus

Urgency = Literal["look", "late", "final"]
URGENCIES: tuple[Urgency, ...] = ("look", "late", "final")
"""In ascending order."""
_SHORTEST_REPEAT_S = 10.0
_STATES = {
    "T": "it is stopped by a signal (SIGCONT lets it go on)",
    "t": "a debugger holds it",
    "D": "it waits for a disk or a file server",
    "Z": "it has ended",
    "R": "it runs, in code that holds Python's global lock (the GIL)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process of a rank that is connected to the server."""

    host_name: str
    pid: int
    is_here: bool
    """On the server's host, so that the kernel can be asked about it."""

    def describe_silence(self) -> str:
        state = _STATES.get(_state_of(self.pid), "") if self.is_here else ""
        why = state or ("" if self.is_here else "it is stopped, or its host cannot be reached")
        return f"does not answer (on {self.host_name}, process {self.pid})" + (f": {why}" if why else "")


def _state_of(pid: int) -> str:
    """The kernel's letter for the state of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the ranks' answers say."""

    rank: int
    """The rank that noticed."""
    text: str
    ends: bool
    """The run ends with it."""


@dataclass(slots=True, kw_only=True)
class _Inquiry:
    rank: int
    urgency: Urgency
    until_s: float
    statuses: dict[int, RankStatus] = field(default_factory=dict)


class Inquiries:
    """One question at a time to all ranks."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._current: _Inquiry | None = None
        self._ended: dict[int, RankStatus] = {}
        self._told = ""
        """The kind of what was reported last, as long as it lasts."""
        self._repeat_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._current is not None

    @property
    def urgency(self) -> Urgency | None:
        """Of the present question."""
        return None if self._current is None else self._current.urgency

    def may_decide(self, num_ranks: int) -> bool:
        """False as long as `decide` would wait for more answers of this many ranks."""
        current = self._current
        return current is not None and (len(current.statuses) >= num_ranks or time.monotonic() >= current.until_s)

    def begin(self, rank: int, status: RankStatus, urgency: Urgency) -> bool:
        """A rank has waited for long. True if all ranks have to be asked now."""
        current = self._current
        if current is None or (current.urgency == "look" and urgency != "look"):
            self._current = _Inquiry(
                rank=rank,
                urgency=urgency,
                until_s=time.monotonic() + self._limits.answer_s,
                statuses={rank: status},
            )
            return True
        if urgency != "look" or current.urgency == "look":
            current.statuses[rank] = status
        if URGENCIES.index(urgency) > URGENCIES.index(current.urgency):
            current.rank, current.urgency = rank, urgency
        return False

    def answer(self, rank: int, status: RankStatus, asked: Urgency) -> None:
        """`asked`: the urgency of the question that this answers, which may be an earlier one."""
        if self._current is not None and (asked != "look" or self._current.urgency == "look"):
            self._current.statuses.setdefault(rank, status)

    def leave(self, rank: int, status: RankStatus) -> None:
        """A rank ends, normally or by an error; others may still wait for it."""
        self._ended[rank] = status

    def explain_error(self) -> str | None:
        """What is to be added to an error if the ranks that have ended made different calls."""
        return describe_different_calls(self._ended) if self._ended else None

    def go_on(self, rank: int, waited_s: float) -> str | None:
        """What to say when a rank's wait, which was reported, is over."""
        if not self._told:
            return None
        self._told, self._repeat_s = "", 0.0
        return f"rank {rank} goes on after waiting {waited_s:,.1f} s"

    def decide(self, processes: Mapping[int, RankProcess]) -> Finding | None:
        """What the answers say, once all ranks have answered or had the time to."""
        current, now = self._current, time.monotonic()
        if current is None or (now < current.until_s and not processes.keys() <= current.statuses.keys()):
            return None
        self._current = None
        statuses = {**self._ended, **current.statuses}
        silent = {rank: one.describe_silence() for rank, one in processes.items() if rank not in statuses}
        text, kind = describe_different_calls(statuses), "different calls"
        if text is None:
            if current.urgency == "look":
                return None
            text, kind = describe_wait(current.rank, statuses, silent), "wait"
        if current.urgency == "final":
            return Finding(rank=current.rank, text=text, ends=True)
        if kind == self._told and now < self._repeat_s:
            return None
        waited_s = max((one.waited_s for one in statuses[current.rank].exchanges.waiting), default=0.0)
        self._told, self._repeat_s = kind, now + max(_SHORTEST_REPEAT_S, 3 * waited_s)
        return Finding(rank=current.rank, text=text, ends=False)
