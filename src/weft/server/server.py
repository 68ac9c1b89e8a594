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

from weft.errors import LaunchError
from weft.server.acceptance import accept
from weft.server.all_together import AllTogether
from weft.server.each_alone import EachAlone
from weft.server.hello import answer_hello
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
from weft.server.protocol.settings import Settings
from weft.server.protocol.worker_rank import SESSION_BITS
from weft.server.recovery import Recovery
from weft.server.weights.first_values import FirstValues
from weft.server.weights.shares import Shares
from weft.server.weights.store import PartStore
from weft.server.weights.updates import Updates
from weft.server.workers.arrivals import Arrivals
from weft.server.workers.members import DEAD_AFTER_S, Members

LEADER = 0
_KNOWN = Message(kind=Kind.KNOWN)
_NOBODY_GOES_ON = frozenset({Kind.PUSH, Kind.PUSH_SHARED, Kind.ALIVE})
"""Most messages: nothing follows from one of these, so that of hundreds of workers none is looked at."""


class ParameterServer:
    """One server's weights and members."""

    def __init__(
        self,
        number: int = 0,
        *,
        dead_after_s: float = DEAD_AFTER_S,
        most_frame_bytes: int | None = None,
        invitations: Invitations | None = None,
        num_servers: int | None = None,
        attempt: int = 0,
        comes_back_s: float = 0.0,
        host: str = "",
    ) -> None:
        """`most_frame_bytes`: the longest frame that its connections let through. `invitations`: of the first server,
        where the run was given a name. `num_servers`: of the plan, as far as it is known before a worker is there.
        `attempt`: earlier processes of this server, which died. `comes_back_s`: within which time it is started again,
        from a snapshot; 0: never. `host`: whose ranks share memory with it; empty: none."""
        self.number, self._dead_after_s, self._most_frame_bytes = number, dead_after_s, most_frame_bytes
        self.invitations = invitations
        self.settings: Settings | None = None
        self._job = 0  # the digest of the settings, which takes as long as an update of a small layer
        self.layout: ServerLayout | None = None
        self.store: PartStore | None = None
        self.updates: Updates | None = None
        self.mode: AllTogether | EachAlone | None = None
        self.members = Members(num_ranks=1, dead_after_s=dead_after_s)
        self.others = OtherServers(number, attempt=attempt, num_servers=num_servers)
        self.recovery = Recovery(attempt=attempt, comes_back_s=comes_back_s)
        self.shares = Shares(host)
        self.refused: Counter[str] = Counter()
        """Messages that changed nothing, by reason."""
        self.arrivals: dict[int, Arrivals] = {}
        self._first: FirstValues | None = None
        """Until all of them are here."""
        self._waiting: dict[int, None] = {}
        """Workers that have no weights for their next clock yet."""
        self._asks_state: dict[bytes, Message] = {}
        """Questions for the optimizer's state, by connection."""
        self.leaving: dict[int, int] = {}
        """Sessions of workers that are gone here, and maybe not yet for the other servers."""
        self._farewells: list[Reply] = []
        self.num_tickets = 0
        self.first_progress = (0, 0)
        """Step and place in the data at which training goes on."""

    @property
    def version(self) -> int:
        return 0 if self.store is None else self.store.version

    def receive(self, peer: bytes, frames: Sequence[Buffer], now_s: float) -> list[Reply]:
        """What a message is answered with. One that is not as it should be changes nothing, and is counted. Raises
        LaunchError if the server that leads refuses this one."""
        try:
            message = read_message(frames)
            replies = list(self._handle(peer, message, now_s))
            if message.kind in _NOBODY_GOES_ON:
                return replies
        except Malformed:
            self.refused["malformed"] += 1
            replies = []
        return replies + list(self._settle())

    def tick(self, now_s: float) -> list[Reply]:
        """Give up workers that were not heard for too long. Called when all messages that have come were received."""
        for worker in self.members.silent(now_s):
            self.leave(worker)
        if self.mode is not None:
            ended = self.members.ended
            for worker in self.recovery.overdue(self.mode.awaited, self.members.workers, now_s, ended=ended):
                self.mode.give_up(worker)
        return list(self._settle())

    def lost(self, peer: bytes) -> list[Reply]:
        """A connection is gone: a message to it could not be sent."""
        if (known := self.members.who(peer)) is not None:
            self.leave(known[0])
        return list(self._settle())

    def introduce(self) -> list[Reply]:
        """What a server that does not lead says to the one that does, whenever it is connected to it."""
        num_known = 0
        if self.mode is not None:
            self.mode.outbox.clear()
            self.mode.say_again(self.leaving)
            num_known = self.mode.num_known
        self.others.outbox.clear()
        for worker, start in self.members.ended.items():
            self.others.say_ended(worker, start << SESSION_BITS, to=LEADER)
        return [Reply(peer=TO_LEADER, message=self.others.introduction(num_known)), *self.converse()]

    @property
    def is_left(self) -> bool:
        """Nobody is there, and nobody is to come again."""
        awaited = () if self.mode is None else self.mode.awaited
        return self.members.is_empty and not self.recovery.awaits(awaited, self.members.workers)

    @property
    def is_over(self) -> bool:
        """All workers have ended."""
        return self.members.is_over and self.is_left

    def _handle(self, peer: bytes, message: Message, now_s: float) -> Iterator[Reply]:
        kind = message.kind
        if kind == Kind.HELLO:
            yield from answer_hello(self, peer, message, now_s)
        elif kind == Kind.ALIVE:  # by a connection of its own, from another thread
            self.members.heard(message.worker, now_s, session=message.session)
            self.recovery.hear(message.worker, now_s)
            yield Reply(peer=peer, message=self.message(Kind.ALIVE, message.worker))  # so is this server
        elif kind == Kind.ASK_RUN:
            if self.invitations is None:
                raise Malformed("asked for a run by one that this server cannot let in")
            run = self.invitations.give(self.others, self.members, message.session, now_s, self.store is not None)
            yield Reply(peer=peer, message=self.message(Kind.RUN, 0, frames=(pack_object(run),)))
        elif kind == Kind.SERVES:
            if (problem := self.others.meet(peer, message) or self._tell_known(message)) is not None:
                self.refused["refused"] += 1
                yield self.refusal(peer, problem)
                return
            for worker, start in self.members.ended.items():
                self.others.say_ended(worker, start << SESSION_BITS, to=message.place)
            if self.mode is None:
                known = pack_object({"decisions": []})
                yield Reply(peer=peer, message=replace(_KNOWN, server=message.place, frames=(known,)))
        elif kind == Kind.REFUSED and peer == TO_LEADER:
            raise LaunchError(read_object(message, {"why": str})["why"])
        elif kind in SERVER_KINDS:
            self._hear(self.others.require(peer, message))
        elif (sender := self.members.who(peer)) is None:
            self.refused["stranger"] += 1
            if kind == Kind.COMMIT and self.recovery.has_seen(message.worker, message.session):
                yield self.given_up(peer, message.worker, message.session)
            elif kind == Kind.LEAVE and self.settings is not None and message.job == self._job:
                self._note_ended(message.worker, message.session)
        else:
            if sender != (message.worker, message.place, message.session) or message.job != self._job:
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
        elif message.kind == Kind.PUSH_SHARED:
            self.arrivals[worker].push(self.shares.read(message))
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
            self._note_ended(worker, message.session)
            self.leave(worker, asks_back=False)
        else:
            raise Malformed(f"{message.kind.name} is not for servers")

    def _settle(self) -> Iterator[Reply]:
        """What follows from a message: what servers say to each other, and weights for workers that may go on."""
        yield from self.converse()
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

    def converse(self) -> Iterator[Reply]:
        """Send what there is to say to other servers, and let the mode hear what it says to this one."""
        while self.others.outbox:
            message = self.others.outbox.popleft()
            if (peer := self.others.peer_of(message.server)) is not None:
                yield Reply(peer=peer, message=message)
        outbox = self.mode.outbox if self.mode is not None else ()
        while outbox:
            message = outbox.popleft()
            if message.server == self.number:
                self._hear(message)
            elif (peer := self.others.peer_of(message.server)) is not None:
                yield Reply(peer=peer, message=message)

    # Members.

    def begin(self, settings: Settings) -> None:
        """The first hello decides what this server is to do."""
        job = None if self.invitations is None else self.invitations.job
        layout = accept(settings, number=self.number, job=job, most_frame_bytes=self._most_frame_bytes)
        self.settings, self.layout, self._job = settings, layout, settings.digest
        self.others.num_servers = settings.num_servers
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

    def join(self, worker: int) -> None:
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

    def leave(self, worker: int, *, asks_back: bool = True, later: int = 0, is_known: bool = False) -> None:
        """A worker's session is over, which its ranks are told. `later`: the session in which one of them has said
        hello meanwhile. `is_known`: other servers know it."""
        session = self.members.session_of(worker)
        peers = self.members.peers_of(worker).values() if asks_back else ()
        self._farewells += [self.given_up(peer, worker, session, later=later) for peer in peers]
        was_whole = worker in self.members.workers
        self.members.leave(worker)
        self.shares.leave(worker)
        self._waiting.pop(worker, None)
        if worker in self.arrivals:
            self.arrivals[worker].drop_open()
            self.recovery.leave(worker, self.arrivals[worker].end)
        if self.store is not None:
            self.store.forget(worker)
            if was_whole and self.mode is not None and not is_known:
                self.leaving |= {worker: session} if self.mode.agrees else {}
                self.mode.leave(worker, session)

    # Other servers.

    def _tell_known(self, message: Message) -> str | None:
        """Tell another server what it does not know; returns why it cannot be one of this run."""
        if self.mode is None:
            return None
        return self.mode.meet(message.place, read_object(message, {"num_known": int})["num_known"])

    def _note_ended(self, worker: int, session: int) -> None:
        """A worker has said that it ends, here or to another server: its goodbye may not reach all of them."""
        if self.members.said_goodbye(worker, session):
            self.others.pass_on_ended(worker, session)

    def _hear(self, message: Message) -> None:
        if message.kind == Kind.ENDED:
            self._note_ended(message.worker, message.session)
            return
        if self.mode is None:
            self.others.keep_early(message)
            return
        for worker, session in self.mode.hear(message):
            if self.leaving.get(worker) == session:
                del self.leaving[worker]
            if self.members.session_of(worker) == session:
                self.leave(worker, is_known=True)

    # Weights.

    def start_if_ready(self) -> None:
        """With the last of the first weights, workers that wait for them take part."""
        assert self.layout is not None and self.settings is not None and self.mode is not None
        if self._first is None or not self._first.are_here:
            return
        self.store, self._first = self._first.make_store(), None
        self.updates = Updates(self.store, self.layout, self.settings)
        self.updates.step, self.updates.position = self.first_progress
        self.mode.begin(self.updates)
        for worker in self.members.workers:
            self.join(worker)

    def refusal(self, peer: bytes, why: str) -> Reply:
        return Reply(peer=peer, message=self.message(Kind.REFUSED, 0, frames=(pack_object({"why": why}),)))

    def given_up(self, peer: bytes, worker: int, session: int, *, later: int = 0) -> Reply:
        """A session is over; the one that is next is the same for all ranks of the worker."""
        following = max(self.members.next_session(worker, session), later)
        return Reply(peer=peer, message=self.message(Kind.GIVEN_UP, worker, session=session, clock=following))

    def message(self, kind: Kind, worker: int, *, session: int | None = None, **fields: Any) -> Message:
        return Message(
            kind=kind,
            job=self._job,
            session=max(self.members.session_of(worker), 0) if session is None else session,
            worker=worker,
            server=self.number,
            version=self.version,
            **fields,
        )
