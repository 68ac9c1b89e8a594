"""What the first server has decided, for servers that have to carry it out again from a snapshot.

A decision stays until the snapshots of all servers cover it. It goes to the first server's file (`records`) before any
message leaves that rests on it, so whatever a server knows, the first one still knows when it is started again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from weft.server.agreement import Decision
from weft.server.protocol.message import Malformed
from weft.server.weights.updates import Said

_FOR_A_LOST_CONNECTION = 4
"""Decisions that another server may have missed which was never started again: the last update, and new members."""


class Decisions:
    """On the server that leads."""

    def __init__(self, num_servers: int, *, recovers: bool) -> None:
        """`recovers`: servers are started again when they die."""
        self._num_servers, self._recovers = num_servers, recovers
        self._kept: list[Decision] = []
        self.num_made = 0
        """Decisions so far."""
        self.records: deque[dict[str, Any]] = deque()
        """What is to go to the file."""
        self._saved: dict[int, int] = {}
        """Decisions that the last snapshot of each server covers."""

        self.save_is_due = False
        """After the next update all servers are to take a snapshot."""
        self._num_common = 0
        """Decisions that the last such snapshot covers."""
        self.common_version = 0
        """The version of the weights of which all servers take a snapshot, once it is there, on any server."""
        self._gone: list[int] = []
        """Workers that have left the round which the last decision began."""

    def go_on(self, records: Sequence[Mapping[str, Any]], num_made: int) -> tuple[int, ...]:
        """Those of an earlier process, of whose snapshot `num_made` are a part; returns the workers that have left the
        last round since it began. Raises Malformed."""
        for record in records:
            if "gone" in record:
                self._gone.append(record["gone"])
                continue
            decision = read_decision(record)
            if self._kept and self._kept[-1].number == decision.number:  # with its norm
                self._kept[-1] = decision
            else:
                self._kept.append(decision)
                self._gone = []
        if self._kept:
            members = (one for one in self._kept[-1].members if one not in self._gone)
            self._kept[-1] = replace(self._kept[-1], members=tuple(members))
        self.num_made = max(num_made, self._kept[-1].number + 1 if self._kept else 0)
        return tuple(self._gone)

    def add_gone(self, worker: int) -> None:
        """A worker has left this round, which all servers are told."""
        self._gone.append(worker)
        self._record({"gone": worker})

    @property
    def last(self) -> Decision | None:
        return self._kept[-1] if self._kept else None

    def since(self, number: int) -> list[Decision]:
        """This decision and all later ones."""
        return [one for one in self._kept if one.number >= number]

    def knows_since(self, number: int) -> bool:
        """Nothing of this decision and later ones is lost."""
        return number <= self.num_made and len(self.since(number)) == self.num_made - number

    def add(self, decision: Decision) -> Decision:
        """A new one, which gets its number."""
        saves = self.save_is_due and bool(decision.chosen) and self._least_saved >= self._num_common
        decision = replace(decision, number=self.num_made, saves=saves)
        self.num_made += 1
        if saves:
            self.save_is_due, self._num_common = False, self.num_made
        self._kept.append(decision)
        self._gone = []
        if not self._recovers:
            self._kept = self._kept[-_FOR_A_LOST_CONNECTION:]
        self._record(as_plain(decision))
        return decision

    def carried_out(self, decision: Decision) -> None:
        """A decision was carried out on this server."""
        if decision.saves:
            self.common_version = decision.version + 1

    def update_of(self, version: int) -> Decision:
        """The decision on the update of a version; raises Malformed."""
        for one in reversed(self._kept):
            if one.chosen and one.version == version:
                return one
        raise Malformed(f"a norm of version {version}, of whose update nothing is known")

    def add_norm(self, decision: Decision, norm: float) -> None:
        """The norm of the gradient that a decision is about."""
        found = replace(decision, norm=norm)
        self._kept[self._kept.index(decision)] = found
        self._record(as_plain(found))

    def _record(self, record: dict[str, Any]) -> None:
        if self._recovers:
            self.records.append(record)

    def note_saved(self, server: int, number: int) -> None:
        """So many decisions are a part of a server's last snapshot."""
        self._saved[server] = number

    def forget_saved(self) -> None:
        """Leave out what no server will ask for."""
        self._kept = self.since(self._least_saved)

    @property
    def _least_saved(self) -> int:
        """Decisions that the last snapshots of all servers cover."""
        return min(self._saved.get(server, 0) for server in range(self._num_servers))

    def as_records(self) -> list[dict[str, Any]]:
        """All that a file of them has to hold."""
        return [*map(as_plain, self._kept), *({"gone": worker} for worker in self._gone)]


_SAID: dict[str, type] = {"loss_sum": str, "count": str, "step": int, "position": int, "is_finite": bool}
_FIELDS: dict[str, type] = {"number": int, "version": int, "chosen": list, "complete": list, "members": list}


def as_plain(decision: Decision) -> dict[str, Any]:
    """For messages and the file. A norm or a loss may be infinite, for which JSON has no number."""
    lists = {name: list(getattr(decision, name)) for name in ("chosen", "complete", "members")}
    said = None if decision.said is None else {name: _hex(one) for name, one in asdict(decision.said).items()}
    return {**asdict(decision), **lists, "norm": _hex(decision.norm), "said": said}


def _hex(value: Any) -> Any:
    """A float as text, anything else as it is."""
    return value.hex() if isinstance(value, float) else value


def read_decision(found: Any) -> Decision:
    """Raises Malformed."""
    if not isinstance(found, Mapping) or any(not isinstance(found.get(name), kind) for name, kind in _FIELDS.items()):
        raise Malformed("a decision that is none")
    chosen, complete, members = (tuple(found[name]) for name in ("chosen", "complete", "members"))
    if not all(isinstance(one, int) for one in (*chosen, *complete, *members)):
        raise Malformed("workers that are no numbers")
    try:
        norm = None if found.get("norm") is None else float.fromhex(found["norm"])
        said = None if found.get("said") is None else _read_said(found["said"])
    except (ValueError, TypeError, OverflowError, AttributeError):
        raise Malformed("a norm, or what workers said, that is no number") from None
    if chosen and said is None:
        raise Malformed("an update of which nothing was said")
    return Decision(
        version=found["version"],
        chosen=chosen,
        complete=complete,
        members=members,
        number=found["number"],
        norm=norm,
        saves=found.get("saves") is True,
        said=said,
    )


def _read_said(found: Mapping[str, Any]) -> Said:
    """Raises ValueError or TypeError."""
    wrong = [name for name, kind in _SAID.items() if type(found.get(name)) is not kind]
    if wrong:
        raise ValueError(f"{wrong} of what was said")
    numbers: dict[str, Any] = {name: float.fromhex(found[name]) for name, kind in _SAID.items() if kind is str}
    return Said(**numbers, **{name: found[name] for name, kind in _SAID.items() if kind is not str})
