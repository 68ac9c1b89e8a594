"""Synchronous updates, one server's part: it tells the first server what has come, and makes the updates decided there.

    decided   5 (workers 0, 1)   6 (0, 1, 2)   7 (1, 2)        a server that begins again after 4 makes 5, 6 and 7 of
    here      0 1                0 1           1               what workers send again: 5 at once, 6 when 2 has come

Decisions are made in their order, each as soon as the gradients are here that it is made of: at once, but on a server
that has been started again. It asks the first server for what was decided since its snapshot. Where gradients are
clipped by their norm, every server waits in each update for the norm over all of them, which is then a part of the
decision.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.server.agreement import Agreement, Decision
from weft.server.decisions import Decisions, as_plain, read_decision
from weft.server.protocol.message import Kind, Malformed, Message, pack_number, pack_object, read_number, read_object
from weft.server.protocol.settings import Settings
from weft.server.weights.gradients import Gradients, norm_of
from weft.server.weights.updates import Told, Updates, said_of
from weft.server.workers.arrivals import Arrivals

LEADER = 0


class AllTogether:
    """The rounds of a synchronous run, as one server takes part in them."""

    def __init__(
        self, *, number: int, settings: Settings, arrivals: Mapping[int, Arrivals], recovers: bool = False
    ) -> None:
        """`recovers`: servers are started again when they die."""
        self._number, self._settings, self._arrivals = number, settings, arrivals
        self.agreement: Agreement | None = None
        """On the server that leads."""
        if number == LEADER:
            self.agreement = Agreement(
                num_servers=settings.num_servers, num_workers=settings.num_workers, backups=settings.backups
            )
        self.decisions = Decisions(settings.num_servers, recovers=recovers)
        """Of the server that leads."""
        self.outbox: deque[Message] = deque()
        self.version = 0
        self.num_dropped = 0
        """Gradients of which no update was made, because they came too late."""
        self.num_lost = 0
        """Gradients that were decided on, and are gone with a worker and a server that died together."""
        self.sharing: tuple[int, ...] = ()
        """The workers of this round, which share its batch."""
        self.has_begun = False
        self.num_made = 0
        """Decisions that were carried out here."""
        self._num_saved = 0
        """Decisions that are a part of this server's last snapshot."""
        self._sessions: dict[int, int] = {}
        """Of each worker, the last."""
        self._used: dict[int, int] = {}
        """Of each worker, the clock after the last one of which an update was made; 0 if there is none."""
        self._brings: dict[int, float] = {}
        """The first clock that a worker can send again."""
        self._gone: set[int] = set()
        """Workers that are gone since the last decision."""
        self._updates: Updates | None = None
        self._pending: deque[Decision] = deque()
        """Decided and not carried out yet."""
        self._knows_all = True
        """The first server has said what was decided while this one was not there."""
        self._waits_for_norm: tuple[Gradients | None] | None = None
        """The gradients of the first decision that is pending."""
        self._squares: dict[int, float] = {}
        """Of the gradients of this update, by server; on the leader."""

    agrees = True  # all servers, on who takes part

    def begin(self, updates: Updates) -> None:
        """Weights are there."""
        self._updates = updates

    # Started again.

    def as_plain(self) -> dict[str, Any]:
        """What `go_on` needs."""
        return {
            "version": self.version,
            "num_made": self.num_made,
            "num_lost": self.num_lost,
            "used": sorted(self._used.items()),
            "sharing": self.sharing,
            "begun": self.has_begun,
        }

    def go_on(self, plain: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        """Begin where an earlier process was. `records`: in the file of the server that leads. Raises Malformed."""
        self.version, self.num_made, self.has_begun = plain["version"], plain["num_made"], plain["begun"]
        self.sharing, self._used, self.num_lost = tuple(plain["sharing"]), dict(plain["used"]), plain["num_lost"]
        self._num_saved = self.num_made
        if self.agreement is None:
            self._knows_all = False
            return
        gone = self.decisions.go_on(records, self.num_made)
        self.sharing = tuple(one for one in self.sharing if one not in gone)
        self.decisions.note_saved(LEADER, self.num_made)
        self._pending.extend(self.decisions.since(self.num_made))
        if (last := self.decisions.last) is not None:
            self.agreement.go_on(last.version + bool(last.chosen), last.members)
        elif self.has_begun:
            self.agreement.go_on(self.version, self.sharing)

    @property
    def num_known(self) -> int:
        """Decisions that are known here."""
        return self.num_made + len(self._pending)

    @property
    def is_behind(self) -> bool:
        """Not all that was decided is done."""
        return bool(self._pending) or not self._knows_all

    @property
    def is_in_update(self) -> bool:
        """The gradients of an update are taken, and it is not made yet."""
        return self._waits_for_norm is not None

    @property
    def awaited(self) -> tuple[int, ...]:
        """Workers without whose gradients this server cannot go on."""
        members = () if self.agreement is None else self.agreement.rounds.current
        return tuple({*self.sharing, *members, *(worker for one in self._pending for worker in one.chosen)})

    def give_up(self, worker: int) -> None:
        """A worker has not come again."""
        self._brings[worker] = math.inf
        if self.agreement is not None:
            self.agreement.give_up(worker)
            self._decide()
        self.advance()

    def say_again(self, leaving: Mapping[int, int]) -> None:
        """Say all that the first server has to know of this one. `leaving`: sessions whose end it has not confirmed."""
        for worker, session in leaving.items():
            self._tell(LEADER, Kind.LEFT, worker=worker, session=session, clock=1)
        for worker, session in self._sessions.items():
            if worker not in leaving:
                self._tell(LEADER, Kind.JOINED, worker=worker, session=session)
        self._say_ready()
        if self._waits_for_norm is not None:
            self._say_square(*self._waits_for_norm)

    def meet(self, server: int, num_known: int) -> str | None:
        """To the server that leads: another one says how many decisions it knows, and is told the others; returns why
        that cannot be."""
        if self.agreement is None:
            return None
        if not self.decisions.knows_since(num_known):
            return (
                f"server {server} has made {num_known} decisions, and this one does not know all of {num_known} to "
                f"{self.decisions.num_made}: their snapshots are not of one time; begin again from the last checkpoint"
            )
        self.agreement.forget(server)
        self._squares.pop(server, None)
        told = [as_plain(one) for one in self.decisions.since(num_known)]
        self._tell(server, Kind.KNOWN, frames=(pack_object({"decisions": told}),))
        return None

    def saved(self, num_made: int) -> None:
        """A snapshot with so many decisions is in a file."""
        self._num_saved = num_made
        if self.agreement is not None:
            self.decisions.note_saved(LEADER, num_made)
            self.decisions.forget_saved()

    # What this server sees of its workers.

    def join(self, worker: int, session: int, first: int) -> None:
        """A worker is there, with all its ranks. `first`: the first clock that it can send, -1 if it has just been
        started."""
        self._sessions[worker] = session
        self._brings[worker] = first if first >= 0 else math.inf
        if first >= 0:
            self._used.setdefault(worker, first)  # what it still has was not used, whatever becomes of it here
        self._drop_late(worker)
        self._tell(LEADER, Kind.JOINED, worker=worker, session=session)

    def leave(self, worker: int, session: int) -> None:
        """A worker is gone."""
        self._tell(LEADER, Kind.LEFT, worker=worker, session=session)

    def complete(self, worker: int, session: int) -> None:
        """A worker has sent all of a clock."""
        if self._pending:
            self.advance()
            return
        self._drop_late(worker)
        if self._knows_all and self._arrivals[worker].is_complete(self.version):
            self._say_ready_of(worker, session)

    def may_begin(self, worker: int) -> bool:
        """True if a worker that waits may begin its next clock."""
        if self.is_behind:
            return False
        self._drop_late(worker)
        arrivals = self._arrivals[worker]
        return arrivals.next_clock == self.version and not arrivals.is_complete(self.version) and worker in self.sharing

    def skip(self, worker: int, clock: int) -> None:
        """A worker goes on with a later clock, that of a version which is decided on."""

    def used(self, worker: int) -> int:
        """The clock after the last one of a worker that is in the weights; that before its next one, for a server that
        has not seen any."""
        return self._used.get(worker, self._arrivals[worker].next_clock)

    def told(self, worker: int) -> Told:
        """What a worker is told of the last update."""
        return Told() if self._updates is None else self._updates.last

    # What servers say to each other.

    def hear(self, message: Message) -> Iterator[tuple[int, int]]:
        """Another server, or this one, says something; yields workers that are gone by that, with their sessions."""
        if message.kind in (Kind.GONE, Kind.DECIDED, Kind.NORM, Kind.KNOWN) and message.place != LEADER:
            raise Malformed(f"{message.kind.name} by server {message.place}, which does not lead")
        if message.kind in (Kind.JOINED, Kind.READY, Kind.LEFT, Kind.SQUARE):
            self._lead(message)
        elif message.kind == Kind.GONE:
            self._forget(message.worker, message.session, keeps=bool(message.version))
            yield message.worker, message.session
        elif message.kind == Kind.DECIDED:
            self._take(read_decision(read_object(message, {})))
        elif message.kind == Kind.KNOWN:
            for one in read_object(message, {"decisions": list})["decisions"]:
                self._take(read_decision(one))
            self._knows_all = True
            self._say_ready()
        elif message.kind == Kind.NORM:
            self._take_norm(message.clock, read_number(message))
        else:
            raise Malformed(f"{message.kind.name} is not for servers")

    def _lead(self, message: Message) -> None:
        if (agreement := self.agreement) is None:
            raise Malformed(f"{message.kind.name} is for the first server")
        worker, session = message.worker, message.session
        if message.kind == Kind.JOINED:
            agreement.joined(message.place, worker, session)
        elif message.kind == Kind.READY:
            self.decisions.note_saved(message.place, message.version)
            agreement.ready(message.place, worker, session, message.clock)
        elif message.kind == Kind.LEFT:
            keeps = agreement.left(worker, session)
            if keeps is not None:
                self.decisions.add_gone(worker)
                self._tell_all(Kind.GONE, worker=worker, session=session, version=int(keeps))
            elif message.clock:  # said again: the answer may have been lost
                keeps = agreement.has_complete(worker)
                self._tell(message.place, Kind.GONE, worker=worker, session=session, version=int(keeps))
        else:
            self._add_square(message.place, message.clock, read_number(message))
        self._decide()

    def _add_square(self, server: int, version: int, square: float) -> None:
        decision = self.decisions.update_of(version)
        if decision.norm is not None:  # which this server has not heard
            self._tell(server, Kind.NORM, clock=version, frames=(pack_number(decision.norm),))
            return
        self._squares[server] = square
        if len(self._squares) == self._settings.num_servers:
            norm = math.sqrt(sum(one for _, one in sorted(self._squares.items())))
            self._squares = {}
            self.decisions.add_norm(decision, norm)
            self._tell_all(Kind.NORM, clock=version, frames=(pack_number(norm),))

    def _decide(self) -> None:
        """Unless the last decision has not been carried out here."""
        is_open = self.num_made < self.decisions.num_made
        if self.agreement is None or is_open or (decision := self.agreement.decide()) is None:
            return
        if decision.chosen:
            made_of = [self._arrivals[worker].whole(decision.version) for worker in decision.chosen]
            decision = replace(decision, said=said_of(made_of))
        decision = self.decisions.add(decision)
        self._tell_all(Kind.DECIDED, frames=(pack_object(as_plain(decision)),))

    def _take(self, decision: Decision) -> None:
        """Carry out a decision in its turn."""
        if decision.number < self.num_known:
            return  # which is known already
        if decision.number > self.num_known:
            raise Malformed(f"decision {decision.number} comes, and {self.num_known} is not known")
        self._pending.append(decision)
        self.advance()

    def advance(self) -> None:
        """Carry out all decisions whose gradients are here."""
        num_made = self.num_made
        while self._pending and self._waits_for_norm is None and self._are_here(self._pending[0]):
            self._carry_out(self._pending[0])
        if self.num_made > num_made and not self._pending:
            self._say_ready()
            self._decide()

    def _are_here(self, decision: Decision) -> bool:
        """All gradients that can come have come."""
        version = decision.version
        return all(self._has(one, version) or self._brings.get(one, -1) > version for one in decision.chosen)

    def _has(self, worker: int, version: int) -> bool:
        return worker in self._arrivals and self._arrivals[worker].is_complete(version)

    def _carry_out(self, decision: Decision) -> None:
        assert self._updates is not None
        if decision.version != self.version:
            raise Malformed(f"version {decision.version} is decided on, and {self.version} is here")
        self._gone.clear()
        if not decision.chosen:
            self._end(decision)
            return
        here = [worker for worker in decision.complete if self._has(worker, decision.version)]
        arrived = {worker: self._arrivals[worker].take(decision.version) for worker in here}
        made_of = [arrived[worker] for worker in decision.chosen if worker in arrived]
        self.num_lost += len(decision.chosen) - len(made_of)
        gradients, said = self._updates.prepare(made_of, decision.said), decision.said
        is_clipped = bool(self._settings.clip_norm and said is not None and said.is_finite and said.count)
        if is_clipped and decision.norm is None:
            self._waits_for_norm = (gradients,)
            self._say_square(gradients)
        else:
            self._updates.make(gradients, norm=decision.norm)
            self._end(decision)

    def _take_norm(self, version: int, norm: float) -> None:
        if self._waits_for_norm is None or self._updates is None or self.version != version:
            return  # said again, to another server
        (gradients,), self._waits_for_norm = self._waits_for_norm, None
        self._updates.make(gradients, norm=norm)
        self._end(self._pending[0])
        self._say_ready()
        self.advance()
        self._decide()

    def _end(self, decision: Decision) -> None:
        """What was decided on is done."""
        assert self._updates is not None
        for worker in decision.complete:
            is_used = worker in decision.chosen and not self._updates.last.is_skipped
            self._used[worker] = decision.version + 1 if is_used else self._used.get(worker, 0)
        self._pending.popleft()
        self.num_made += 1
        self.decisions.carried_out(decision)
        if decision.chosen:
            self.version += 1
            self.num_dropped += len(decision.complete) - len(decision.chosen)
        self.sharing = tuple(one for one in decision.members if one not in self._gone)
        self.has_begun = True

    def _drop_late(self, worker: int) -> None:
        """Leave what a worker has sent of versions that were made without it; it goes on with the others."""
        arrivals = self._arrivals[worker]
        while arrivals.is_complete(arrivals.next_clock) and arrivals.next_clock < self.version:
            arrivals.take(arrivals.next_clock)
            self._used.setdefault(worker, 0)
            self.num_dropped += 1
        if not arrivals.is_open:
            arrivals.begin_with(self.version)

    def _forget(self, worker: int, session: int, *, keeps: bool) -> None:
        """A worker is gone. Unless its gradients count all the same, nothing of them stays but what is decided on."""
        if self._sessions.get(worker) != session:
            return  # which has come again
        del self._sessions[worker]
        self.sharing = tuple(one for one in self.sharing if one != worker)
        self._gone.add(worker)
        if not keeps:
            self._arrivals[worker].drop_from(self.version + sum(bool(one.chosen) for one in self._pending))

    def _say_ready(self) -> None:
        """Say what is complete of this version."""
        if not self.is_behind:
            for worker, session in self._sessions.items():
                if self._arrivals[worker].is_complete(self.version):
                    self._say_ready_of(worker, session)

    def _say_ready_of(self, worker: int, session: int) -> None:
        self._tell(LEADER, Kind.READY, worker=worker, session=session, clock=self.version, version=self._num_saved)

    def _say_square(self, gradients: Gradients | None) -> None:
        square = 0.0 if gradients is None else norm_of(gradients) ** 2
        self._tell(LEADER, Kind.SQUARE, clock=self.version, frames=(pack_number(square),))

    def _tell(self, server: int, kind: Kind, **fields: Any) -> None:
        self.outbox.append(Message(kind=kind, server=server, place=self._number, **fields))

    def _tell_all(self, kind: Kind, **fields: Any) -> None:
        for server in range(self._settings.num_servers):
            self._tell(server, kind, **fields)
