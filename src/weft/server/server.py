"""A parameter server without sockets: messages in, messages out, and the weights in between.

    HELLO ─ all workers there ─ INITIAL ─ BEGIN, WEIGHTS ──> PUSH, PUSH, ..., COMMIT ─ update ─ BEGIN, WEIGHTS ──> ...

What happens depends on the messages and their order alone, and on the times that the caller gives: a recorded run
replays to the same weights. When updates are made, and who may begin its next clock, is the answer of a mode: of all
workers together (`all_together.py`), or of each one alone (`each_alone.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from weft.errors import LaunchError, WeftError
from weft.server.acceptance import accept
from weft.server.all_together import AllTogether
from weft.server.each_alone import EachAlone
from weft.server.invitations import Invitations
from weft.server.other_servers import TO_LEADER, OtherServers
from weft.server.outgoing import Reply as Reply
from weft.server.outgoing import send_clock, send_fixed, send_state
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import (
    SERVER_KINDS,
    Buffer,
    Kind,
    Malformed,
    Message,
    pack_object,
    read_commit,
    read_message,
    read_object,
)
from weft.server.protocol.settings import Settings, difference, read_settings
from weft.server.protocol.worker_rank import SESSION_BITS
from weft.server.recovery import Recovery, read_clocks
from weft.server.weights.first_values import FirstValues
from weft.server.weights.store import PartStore
from weft.server.weights.updates import Updates
from weft.server.workers.arrivals import Arrivals
from weft.server.workers.members import DEAD_AFTER_S, Members

MOST_WORKERS = 1 << 20
_KNOWN = Message(kind=Kind.KNOWN)


class ParameterServer:
    """One server's weights and members."""

    def __init__(
        self,
        number: int = 0,
        *,
        dead_after_s: float = DEAD_AFTER_S,
        most_frame_bytes: int | None = None,
        invitations: Invitations | None = None,
        attempt: int = 0,
        comes_back_s: float = 0.0,
    ) -> None:
        """`most_frame_bytes`: the longest frame that its connections let through. `invitations`: of the first server,
        where the run was given a name. `attempt`: earlier processes of this server, which died. `comes_back_s`: within
        which time it is started again, from a snapshot; 0: never."""
        self.number, self._dead_after_s, self._most_frame_bytes = number, dead_after_s, most_frame_bytes
        self._invitations = invitations
        self.settings: Settings | None = None
        self.layout: ServerLayout | None = None
        self.store: PartStore | None = None
        self.updates: Updates | None = None
        self.mode: AllTogether | EachAlone | None = None
        self.members = Members(num_ranks=1, dead_after_s=dead_after_s)
        self.others = OtherServers(number, attempt=attempt)
        self.recovery = Recovery(attempt=attempt, comes_back_s=comes_back_s)
        self.refused: Counter[str] = Counter()
        """Messages that changed nothing, by reason."""
        self.arrivals: dict[int, Arrivals] = {}
        self._first: FirstValues | None = None
        """Until all of them are here."""
        self._waiting: dict[int, None] = {}
        """Workers that have no weights for their next clock yet."""
        self._asks_state: dict[bytes, Message] = {}
        """Questions for the optimizer's state, by connection."""
        self._leaving: dict[int, int] = {}
        """Sessions of workers that are gone here, and maybe not yet for the other servers."""
        self._farewells: list[Reply] = []
        self.num_tickets = 0
        self._first_progress = (0, 0)
        """Step and place in the data at which training goes on."""

    @property
    def version(self) -> int:
        return 0 if self.store is None else self.store.version

    def receive(self, peer: bytes, frames: Sequence[Buffer], now_s: float) -> list[Reply]:
        """What a message is answered with. One that is not as it should be changes nothing, and is counted. Raises
        LaunchError if the server that leads refuses this one."""
        try:
            replies = list(self._handle(peer, read_message(frames), now_s))
        except Malformed:
            self.refused["malformed"] += 1
            replies = []
        return replies + list(self._settle())

    def tick(self, now_s: float) -> list[Reply]:
        """Give up workers that were not heard for too long. Called when all messages that have come were received."""
        for worker in self.members.silent(now_s):
            self._leave(worker)
        if self.mode is not None:
            for worker in self.recovery.overdue(self.mode.awaited, self.members.workers, now_s):
                self.mode.give_up(worker)
        return list(self._settle())

    def lost(self, peer: bytes) -> list[Reply]:
        """A connection is gone: a message to it could not be sent."""
        if (known := self.members.who(peer)) is not None:
            self._leave(known[0])
        return list(self._settle())

    def introduce(self) -> list[Reply]:
        """What a server that does not lead says to the one that does, whenever it is connected to it."""
        num_known = 0
        if self.mode is not None:
            self.mode.outbox.clear()
            self.mode.say_again(self._leaving)
            num_known = self.mode.num_known
        return [Reply(peer=TO_LEADER, message=self.others.introduction(num_known)), *self._converse()]

    def _handle(self, peer: bytes, message: Message, now_s: float) -> Iterator[Reply]:
        kind = message.kind
        if kind == Kind.HELLO:
            yield from self._hello(peer, message, now_s)
        elif kind == Kind.ALIVE:  # by a connection of its own, from another thread
            self.members.heard(message.worker, now_s, session=message.session)
            self.recovery.hear(message.worker, now_s)
            yield Reply(peer=peer, message=self.message(Kind.ALIVE, message.worker))  # so is this server
        elif kind == Kind.ASK_RUN:
            if self._invitations is None:
                raise Malformed("asked for a run by one that this server cannot let in")
            run = self._invitations.give(self.others, self.members, message.session, now_s, self.store is not None)
            yield Reply(peer=peer, message=self.message(Kind.RUN, 0, frames=(pack_object(run),)))
        elif kind == Kind.SERVES:
            if (problem := self.others.meet(peer, message) or self._tell_known(message)) is not None:
                self.refused["refused"] += 1
                yield self._refusal(peer, problem)
            elif self.mode is None:
                known = pack_object({"decisions": []})
                yield Reply(peer=peer, message=replace(_KNOWN, server=message.place, frames=(known,)))
        elif kind == Kind.REFUSED and peer == TO_LEADER:
            raise LaunchError(read_object(message, {"why": str})["why"])
        elif kind in SERVER_KINDS:
            self._hear(self.others.require(peer, message))
        elif (sender := self.members.who(peer)) is None:
            self.refused["stranger"] += 1
            if kind == Kind.COMMIT and self.recovery.has_seen(message.worker, message.session):
                yield self._given_up(peer, message.worker, message.session)
            elif kind == Kind.LEAVE:
                self.members.said_goodbye(message.worker, message.session)
        else:
            assert self.settings is not None
            if sender != (message.worker, message.place, message.session) or message.job != self.settings.digest:
                self.refused["impostor"] += 1
                return
            self.members.heard(message.worker, now_s)
            if kind == Kind.ASK_FIXED:
                yield from send_fixed(self, peer, message)
            elif kind == Kind.ASK_STATE:
                if self.store is None:
                    raise Malformed("asked for state before the first weights")
                self._asks_state[peer] = message
            else:
                self._take(message)

    def _take(self, message: Message) -> None:
        """A message of a rank that has said hello."""
        worker = message.worker
        if message.kind in (Kind.INITIAL, Kind.INITIAL_STATE, Kind.INITIAL_FIXED):
            self.take_first(message)
        elif message.kind == Kind.PUSH:
            self.arrivals[worker].push(message)
        elif message.kind == Kind.COMMIT:
            if self.store is None or self.mode is None:
                raise Malformed("a commit before the first weights")
            if self.arrivals[worker].commit(message, read_commit(message)):
                self._waiting[worker] = None
                self.mode.complete(worker, message.session)
        elif message.kind == Kind.SKIP:
            if self.store is None or self.mode is None:
                raise Malformed("a clock is left out before the first weights")
            if self.mode.is_behind:  # it will be where the others are
                self._waiting[worker] = None
            elif self.arrivals[worker].skip_to(message.clock):
                self.mode.skip(worker, message.clock)
                self._waiting[worker] = None
        elif message.kind == Kind.LEAVE:
            self._leave(worker, asks_back=False)
        else:
            raise Malformed(f"{message.kind.name} is not for servers")

    def _settle(self) -> Iterator[Reply]:
        """What follows from a message: what servers say to each other, and weights for workers that may go on."""
        yield from self._converse()
        farewells, self._farewells = self._farewells, []
        yield from farewells
        for worker in sorted(self._waiting):
            if self.mode is not None and self.mode.may_begin(worker) and self._has_its_clocks(worker):
                del self._waiting[worker]
                yield from send_clock(self, worker)
        for peer in [one for one in self._asks_state if not self._is_behind(one)]:
            if self.members.who(peer) is not None:
                yield from send_state(self, peer, self._asks_state[peer])
            del self._asks_state[peer]

    def _has_its_clocks(self, worker: int) -> bool:
        """What a worker had sent before it said hello is applied, or left out; and it is not too far ahead of what is
        saved."""
        clock = self.arrivals[worker].next_clock
        return clock >= self.members.clocks_of(worker)[1] and self.recovery.may_begin(worker, clock)

    def _is_behind(self, peer: bytes) -> bool:
        """The weights that a worker asks for lack what it has sent."""
        known = self.members.who(peer)
        if self.mode is None or known is None:
            return False
        worker = known[0]
        return self.mode.is_behind or self.arrivals[worker].next_clock < self.members.clocks_of(worker)[1]

    def _converse(self) -> Iterator[Reply]:
        """Send what the mode has to say to other servers, and let it hear what it says to this one."""
        outbox = self.mode.outbox if self.mode is not None else ()
        while outbox:
            message = outbox.popleft()
            if message.server == self.number:
                self._hear(message)
            elif (peer := self.others.peer_of(message.server)) is not None:
                yield Reply(peer=peer, message=message)

    # Members.

    def _hello(self, peer: bytes, message: Message, now_s: float) -> Iterator[Reply]:
        settings = read_settings(message)
        said = read_object(message, {"worker": int, "step": int, "position": int, "replaces": list, "clocks": list})
        asked, progress, clocks = said["worker"], (said["step"], said["position"]), read_clocks(said["clocks"])
        if not -1 <= asked < MOST_WORKERS or not all(0 <= one < 1 << 63 for one in progress):
            raise Malformed(f"worker {asked} at {progress}")
        try:
            if self.settings is None:
                self.begin(settings)
            elif (problem := difference(self.settings, settings)) is not None:
                raise LaunchError(problem)
            is_again = self.members.comes_again(asked, message.place, session=message.session, peer=peer)
            if is_again or self.members.session_of(asked) >> SESSION_BITS in said["replaces"]:
                self._leave(asked, but=message.place)
                yield from self._converse()
            if asked in self._leaving:
                yield Reply(peer=peer, message=self.message(Kind.LATER, asked, session=message.session))
                return
            known = self.members.who(peer)
            free = known[0] if known is not None else self.members.free_number()
            worker = asked if asked >= 0 else free
            session = message.session
            is_whole = self.members.hello(worker, message.place, session=session, peer=peer, now_s=now_s, clocks=clocks)
        except WeftError as error:
            self.refused["refused"] += 1
            yield self._refusal(peer, str(error))
            return
        assert self.layout is not None
        self.recovery.see(worker, message.session)
        self._first_progress = max(self._first_progress, progress)
        self.arrivals_of(worker)
        welcome = {
            "worker": worker,
            "next_clock": self.arrivals[worker].next_clock,
            "version": self.version,
            "has_weights": self.store is not None,
            "comes_back_s": self.recovery.comes_back_s,
        }
        yield Reply(peer=peer, message=self.message(Kind.WELCOME, worker, frames=(pack_object(welcome),)))
        if is_whole:
            self._join(worker)

    def begin(self, settings: Settings) -> None:
        """The first hello decides what this server is to do."""
        job = None if self._invitations is None else self._invitations.job
        layout = accept(settings, number=self.number, job=job, most_frame_bytes=self._most_frame_bytes)
        self.settings, self.layout = settings, layout
        self._first = FirstValues(layout)
        self.members = Members(num_ranks=settings.num_ranks, dead_after_s=self._dead_after_s)
        if settings.is_sync:
            self.mode = AllTogether(
                number=self.number, settings=settings, arrivals=self.arrivals, recovers=self.recovery.is_on
            )
        else:
            bound = settings.staleness if settings.mode == "bounded" else None
            self.mode = EachAlone(num_workers=settings.num_workers, staleness=bound, arrivals=self.arrivals)
        for message in self.others.take_early():
            self._hear(message)

    def _join(self, worker: int) -> None:
        """All ranks of a worker are there."""
        assert self.mode is not None
        self.start_if_ready()
        if self.store is not None and worker not in self._waiting:
            self._waiting[worker] = None
            self.mode.join(worker, self.members.session_of(worker), self.members.clocks_of(worker)[0])
            self.recovery.join(worker, self.arrivals[worker].next_clock)
            self.mode.advance()

    def arrivals_of(self, worker: int) -> Arrivals:
        """What comes of a worker."""
        if worker not in self.arrivals:
            assert self.layout is not None
            pushes, owners = self.layout.pushes, self.layout.owners
            num_ranks = self.layout.settings.num_ranks
            self.arrivals[worker] = Arrivals(num_ranks=num_ranks, pushes=pushes, owners=owners)
        return self.arrivals[worker]

    def take_first(self, message: Message) -> None:
        """First values of a bucket, trained or not, or the optimizer's state of it."""
        if self._first is not None:  # else of a worker that did not know that another one was first
            self._first.take(message)
            self.start_if_ready()

    def _leave(self, worker: int, *, asks_back: bool = True, but: int | None = None, is_known: bool = False) -> None:
        """A worker is gone, which its ranks are told; not the one that has said hello anew (`but`). `is_known`: other
        servers know it."""
        session = self.members.session_of(worker)
        peers = self.members.peers_of(worker).items() if asks_back else ()
        self._farewells += [self._given_up(peer, worker, session) for place, peer in peers if place != but]
        was_whole = worker in self.members.workers
        self.members.leave(worker, is_over=not asks_back)
        self._waiting.pop(worker, None)
        if worker in self.arrivals:
            self.arrivals[worker].drop_open()
            self.recovery.leave(worker, self.arrivals[worker].end)
        if self.store is not None:
            self.store.forget(worker)
            if was_whole and self.mode is not None and not is_known:
                self._leaving |= {worker: session} if self.mode.agrees else {}
                self.mode.leave(worker, session)

    # Other servers.

    def _tell_known(self, message: Message) -> str | None:
        """Tell another server what it does not know; returns why it cannot be one of this run."""
        if self.mode is None:
            return None
        return self.mode.meet(message.place, read_object(message, {"num_known": int})["num_known"])

    def _hear(self, message: Message) -> None:
        if self.mode is None:
            self.others.keep_early(message)
            return
        for worker, session in self.mode.hear(message):
            if self._leaving.get(worker) == session:
                del self._leaving[worker]
            if self.members.session_of(worker) == session:
                self._leave(worker, is_known=True)

    # Weights.

    def start_if_ready(self) -> None:
        """With the last of the first weights, workers that wait for them take part."""
        assert self.layout is not None and self.settings is not None and self.mode is not None
        if self._first is None or not self._first.are_here:
            return
        self.store, self._first = self._first.make_store(), None
        self.updates = Updates(self.store, self.layout, self.settings)
        self.updates.step, self.updates.position = self._first_progress
        self.mode.begin(self.updates)
        for worker in self.members.workers:
            self._join(worker)

    def _refusal(self, peer: bytes, why: str) -> Reply:
        return Reply(peer=peer, message=self.message(Kind.REFUSED, 0, frames=(pack_object({"why": why}),)))

    def _given_up(self, peer: bytes, worker: int, session: int) -> Reply:
        return Reply(peer=peer, message=self.message(Kind.GIVEN_UP, worker, session=session))

    def message(self, kind: Kind, worker: int, *, session: int | None = None, **fields: Any) -> Message:
        return Message(
            kind=kind,
            job=0 if self.settings is None else self.settings.digest,
            session=max(self.members.session_of(worker), 0) if session is None else session,
            worker=worker,
            server=self.number,
            version=self.version,
            **fields,
        )
