"""One rank of a worker, as it speaks with all servers: what it says, is told, and may have to say again.

    hello ──> welcome ──> begin, weights ──> pushes, commit ──> begin, weights ...

It has no socket and no clock: messages in, messages out. Weights go straight to where they belong. What was pushed is
kept until the server says that it is applied, by beginning a later clock, and saved, where it would be started again
from a snapshot: a server that has lost it gets it again. What is applied and not saved outlives its step: it is copied.

A clock's weights are *arriving*, then *here* while gradients are computed, then gradients are *sent*. What is said of a
clock that is further already changes nothing.

Gradients may be computed while weights are arriving (`use`). Servers send a clock's weights right behind its beginning,
so the rest is of the same versions, unless a connection or a server is lost meanwhile. Synchronous servers then send
the same again, a clock being a version there: what is here stays, and the rest is taken. Where the weights that come
are others, or of a later clock, those in use are *torn*: all are taken anew, and what was computed must not be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

import torch

from weft.server.protocol.asked_state import AskedState
from weft.server.protocol.fixed import FixedExchange, FixedValues
from weft.server.protocol.frames import frame_of, write_frame
from weft.server.protocol.kept_messages import KeptMessages
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import (
    Begin,
    Buffer,
    Commit,
    Kind,
    Malformed,
    Message,
    pack_begin,
    pack_commit,
    pack_object,
    read_begin,
    read_object,
)
from weft.server.protocol.optimizer_state import PartState, pack_states
from weft.server.protocol.rank_share import RankShares
from weft.server.protocol.settings import MASTER, Settings

LEADER = 0
SESSION_BITS = 32
"""The lower bits of a session, which count the sessions of one start of a worker; the upper ones are drawn then."""


class State(Enum):
    """Of the current clock."""

    ARRIVING = 0
    HERE = 1
    SENT = 2


class WorkerRank:
    """The state of one rank's conversations."""

    def __init__(
        self,
        settings: Settings,
        weights: Sequence[Sequence[torch.Tensor | None]],
        *,
        worker: int,
        start: int,
        place: int = 0,
        gives_first: bool = True,
        first_state: Callable[[int, int], PartState] | None = None,
        progress: tuple[int, int] = (0, 0),
        earlier_starts: Sequence[int] = (),
        host: str = "",
        fixed: FixedValues | None = None,
    ) -> None:
        """`weights`: by server and part, the flat views that weights are written to, and first values are read from;
        None for parts that this rank has not. `worker`: its number, or -1 to be given one. `start`: a random number of
        this start of the worker, the same on all its ranks. `gives_first`: first values are this worker's, where
        servers have none. `first_state`: the optimizer's of a server's part, where training goes on.
        `progress`: step and place in the data of first values. `earlier_starts`: those of this worker that are over,
        for which servers need not wait. `fixed`: what it does not train. `host`: whose servers it
        shares memory with; empty for none."""
        self.settings, self.worker, self.place = settings, worker, place
        self.layouts = [ServerLayout.of(settings, server) for server in range(settings.num_servers)]
        self.session = start << SESSION_BITS
        self.clock = -1
        self.state = State.SENT
        self.begins: dict[int, Begin] = {}
        """What each server said of this clock."""
        self.versions: dict[int, int] = {}
        """Updates that each server had made of the weights of this clock."""
        self.refused: str | None = None
        """Why a server refuses this worker for good."""
        self.welcomed: set[int] = set()
        """Servers at which this session is."""
        self.is_torn = False
        """The weights in use were not all of the versions that servers began this clock with."""
        self._in_use = False
        """Gradients are computed with those of this clock's weights that are here."""
        self.comes_back_s: dict[int, float] = {}
        """Seconds within which a server that died is started again, by what it said."""
        self._weights, self._gives_first, self._job = weights, gives_first, settings.digest
        self._first_state, self._progress, self._earlier_starts = first_state, progress, list(earlier_starts)
        self._fixed = FixedExchange(self.layouts, place, fixed)
        self._missing: dict[int, set[int]] = {}
        """Buckets of this clock's weights that have not come, by server."""
        self.kept = KeptMessages(settings.num_servers)
        self._expected = [
            {bucket for bucket in range(len(one.buckets)) if place in one.holders(bucket)} for one in self.layouts
        ]
        self.state_of_optimizer = AskedState(self.layouts, self._expected)
        pull = None if settings.pull == MASTER else settings.pull
        self._pull_bytes = [one.frame_bytes(pull) for one in self.layouts]
        self.shares = RankShares(self.layouts, place, host)

    def hello(self) -> list[Message]:
        """What is said first; a worker without a number asks the first server for one."""
        servers = range(len(self.layouts)) if self.worker >= 0 else [LEADER]
        return [self._hello_to(server) for server in servers]

    def hello_again(self, server: int) -> list[Message]:
        """To a server whose connection was lost, in the same session: one that was started again goes on with it, and
        for the others nothing changes; one that still has the old connection ends the session."""
        self.welcomed.discard(server)
        self.shares.forget(server)
        return [self._hello_to(server)]

    def hello_anew(self, session: int | None = None) -> list[Message]:
        """In a new session, because a server has ended the old one, and named the next."""
        self.session = self.session + 1 if session is None else session
        self.welcomed = set()
        self.shares.forget_all()
        if self.state == State.ARRIVING:
            self._await_again()
        return self.hello()

    @property
    def begun(self) -> list[object]:
        """What servers said when this clock began, to compare it with that of the worker's other ranks."""
        begins = sorted(self.begins.items())
        return [self.clock, *([server, self.versions[server], pack_begin(one).hex()] for server, one in begins)]

    def go_back(self, session: int) -> list[Message]:
        """Begin anew, in a session in which all ranks of this worker do, unless this one is in a later one already."""
        self.state = State.ARRIVING
        if session > self.session:
            return self.hello_anew(session)
        self._await_all()
        return []

    def receive(self, message: Message) -> list[Message]:
        """What a message is answered with. Raises Malformed."""
        if message.server >= len(self.layouts):
            raise Malformed(f"server {message.server} of {len(self.layouts)}")
        if message.kind == Kind.REFUSED:
            self.refused = str(read_object(message, {"why": str})["why"])
            return []
        if message.kind == Kind.GIVEN_UP:
            return self._take_session(message.clock)
        if message.session != self.session or message.job != self._job:
            return []  # of an earlier session
        if message.kind == Kind.WELCOME:
            return self._welcome(message)
        if message.kind == Kind.LATER:
            return [self._hello_to(message.server)]
        if message.kind == Kind.BEGIN:
            return self._begin(message)
        if message.kind == Kind.WEIGHTS:
            self._take(message)
        elif message.kind == Kind.WEIGHTS_SHARED:
            return self._take_shared(message)
        elif message.kind == Kind.STATE:
            self.state_of_optimizer.take(message)
        elif message.kind == Kind.FIXED:
            self._fixed.take(message)
            self._look()
        elif message.kind != Kind.ALIVE:
            raise Malformed(f"{message.kind.name} is not for workers")
        return []

    @property
    def has_begun(self) -> bool:
        """All servers have begun this clock."""
        return self.state != State.SENT and len(self.begins) == len(self.layouts)

    def use(self) -> None:
        """Gradients are computed from now on, with the weights of this clock that are here, and the others as they
        come."""
        self._in_use, self.is_torn = True, False

    def has_bucket(self, server: int, bucket: int) -> bool:
        """A bucket of this clock's weights is here."""
        is_here = self._fixed.is_here and server in self.begins and bucket not in self._missing[server]
        return self.state != State.ARRIVING or is_here

    # What this rank says.

    def ask_state(self) -> list[Message]:
        """Ask for the optimizer's state of what this rank holds."""
        self.state_of_optimizer.begin()
        return [self._message(Kind.ASK_STATE, server, clock=self.clock) for server in range(len(self.layouts))]

    def push(self, server: int, bucket: int, frames: Sequence[Buffer]) -> Message:
        """A bucket of this clock's gradients, whose memory must stay as it is while it is kept."""
        message = self._message(Kind.PUSH, server, clock=self.clock, bucket=bucket, frames=tuple(frames))
        return self.kept.keep(message)

    def push_gradients(self, server: int, bucket: int, gradients: Sequence[torch.Tensor | None]) -> Message:
        """A bucket of this clock's gradients, None for a part without one: in memory that is shared with the server,
        where that is there; else as `push`. It is kept, and sent again, as frames."""
        share = self.shares.of(server)
        if share is None or not share.has_gradients(bucket):
            return self.push(server, bucket, [b"" if one is None else frame_of(one.cpu()) for one in gradients])
        kept = self.push(server, bucket, share.put(bucket, gradients))
        return replace(kept, kind=Kind.PUSH_SHARED, version=share.token, is_shared=True)

    def commit(self, said: Commit) -> list[Message]:
        """Nothing more comes of this clock. How many buckets were pushed is filled in."""
        found = []
        for server in range(len(self.layouts)):
            num_buckets = sum(one.kind == Kind.PUSH for one in self.kept.of(server, self.clock))
            frame = pack_commit(replace(said, num_buckets=num_buckets))
            found.append(self.kept.keep(self._message(Kind.COMMIT, server, clock=self.clock, frames=(frame,))))
        self.state, self._in_use = State.SENT, False
        return found

    def alive(self) -> Message:
        """The heartbeat of this session."""
        return self._message(Kind.ALIVE, LEADER)

    def leave(self) -> list[Message]:
        """This worker ends."""
        return [self._message(Kind.LEAVE, server) for server in range(len(self.layouts))]

    def _hello_to(self, server: int) -> Message:
        step, position = self._progress
        own = {"worker": self.worker, "step": step, "position": position, "replaces": self._earlier_starts}
        own |= {"clocks": list(self.kept.clocks_for(server, clock=self.clock)), "host": self.shares.host}
        said = pack_object({**self.settings.as_object(), **own})
        return self._message(Kind.HELLO, server, frames=(said,))

    def _message(
        self, kind: Kind, server: int, *, clock: int = 0, bucket: int = 0, frames: tuple[Buffer, ...] = ()
    ) -> Message:
        return Message(
            kind=kind,
            job=self._job,
            session=self.session,
            worker=max(self.worker, 0),
            place=self.place,
            server=server,
            clock=clock,
            bucket=bucket,
            frames=frames,
        )

    # What servers say.

    def _welcome(self, message: Message) -> list[Message]:
        fields: dict[str, type | tuple[type, ...]] = {"worker": int, "next_clock": int, "has_weights": bool}
        found = read_object(message, {**fields, "comes_back_s": (int, float)})
        self.welcomed.add(message.server)
        self.comes_back_s[message.server] = found["comes_back_s"]
        self.shares.open(message.server, found.get("shared"))
        answers = []
        if self.worker < 0:
            self.worker = found["worker"]
            answers = [self._hello_to(server) for server in range(len(self.layouts)) if server != message.server]
        if not found["has_weights"] and self._gives_first:
            answers += self._first_values(message.server)
        for clock in self.kept.clocks:
            kept = self.kept.of(message.server, clock) if clock >= found["next_clock"] else []
            answers += [replace(one, session=self.session, worker=self.worker) for one in kept]
        if self.state_of_optimizer.is_missing(message.server):
            answers.append(self._message(Kind.ASK_STATE, message.server, clock=self.clock))
        return answers

    def _take_session(self, session: int) -> list[Message]:
        """All ranks of this worker go on in this session, if it is later than theirs."""
        if session >> SESSION_BITS != self.session >> SESSION_BITS:
            raise Malformed(f"session {session} is of another start than {self.session}")
        return self.hello_anew(session) if session > self.session else []

    def _first_values(self, server: int) -> list[Message]:
        layout = self.layouts[server]
        fixed = self._fixed.first_frames(server)
        found = [self._message(Kind.INITIAL_FIXED, server, bucket=bucket, frames=frames) for bucket, frames in fixed]
        for bucket, parts in enumerate(layout.buckets):
            if layout.owners[bucket] != self.place:
                continue
            if self._first_state is not None:
                states = tuple(pack_states([self._first_state(server, part) for part in parts]))
                found.append(self._message(Kind.INITIAL_STATE, server, bucket=bucket, frames=states))
            frames = tuple(frame_of(self._view(server, part).detach().cpu().clone()) for part in parts)
            found.append(self._message(Kind.INITIAL, server, bucket=bucket, frames=frames))
        return found

    def _begin(self, message: Message) -> list[Message]:
        """Each server decides by itself which of a worker's clocks is next, and may know more or less than another of
        what it has left out: all go on with the latest. One that gets lost clocks again goes through them first."""
        is_arriving, behind = self.state == State.ARRIVING, [message.server]
        if message.clock < self.clock or (message.clock == self.clock and not is_arriving):
            comes_again = self.kept.has_from(message.server, message.clock)
            return self._skip(behind) if is_arriving and not comes_again else []
        begin = read_begin(message)
        behind = []
        if message.clock > self.clock:
            behind = list(self.begins) if is_arriving else []
            self._tear()
            self.clock, self.state = message.clock, State.ARRIVING
            self._await_all()
        elif not self.settings.is_sync:
            self._tear()
        self.begins[message.server], self.versions[message.server] = begin, message.version
        if not self._in_use:
            self._missing[message.server] = set(self._expected[message.server])
        self.kept.begin(message.server, begun=message.clock, saved=begin.saved)
        self._look()
        asks = [self._message(Kind.ASK_FIXED, message.server)] if self._fixed.missing[message.server] else []
        return asks + self._skip(behind)

    def _skip(self, servers: Sequence[int]) -> list[Message]:
        return [self.kept.keep(self._message(Kind.SKIP, server, clock=self.clock)) for server in servers]

    def _expects(self, message: Message) -> bool:
        """Weights that are missing."""
        server = message.server
        is_expected = message.clock == self.clock and self.state == State.ARRIVING and server in self.begins
        return is_expected and message.bucket in self._missing[server]

    def _take_shared(self, message: Message) -> list[Message]:
        """Weights that are in a server's memory. What changes meanwhile is of a session that is over."""
        share = self.shares.of(message.server)
        if share is None or not self._expects(message):
            return []
        try:
            found = share.weights(message.clock, message.bucket)
        except OSError:
            self.shares.failed()
            return self.hello_anew()
        if found is not None:
            frames, is_whole = found
            self._take(replace(message, frames=frames), is_whole=is_whole)
            self.shares.read_bytes[message.server] += sum(map(len, frames))
        return []

    def _take(self, message: Message, *, is_whole: Callable[[], bool] = lambda: True) -> None:
        """`is_whole`: whether frames were what they should be until they were copied."""
        server, bucket = message.server, message.bucket
        if not self._expects(message):
            return
        layout, lengths = self.layouts[server], self._pull_bytes[server][bucket]
        if tuple(len(one) for one in message.frames) != lengths:
            raise Malformed(f"bucket {bucket} of weights of {[len(one) for one in message.frames][:4]} bytes")
        for part, frame in zip(layout.buckets[bucket], message.frames, strict=True):
            dtype = layout.dtype(part) if self.settings.pull == MASTER else self.settings.pull
            write_frame(self._view(server, part), frame, dtype)
        if not is_whole():
            return
        self._missing[server].discard(bucket)
        if not self._missing[server]:
            self.shares.took(server, message.clock)
        self._look()

    def _await_all(self) -> None:
        self.begins = {}
        self._missing = {server: set(expected) for server, expected in enumerate(self._expected)}

    def _await_again(self) -> None:
        """What was on its way is lost, and comes again; what is in use stays, where that will be the same."""
        if not self.settings.is_sync:
            self._tear()
        if self._in_use:
            self.begins = {}
        else:
            self._await_all()

    def _tear(self) -> None:
        """Other weights come than those in use."""
        self.is_torn, self._in_use = self.is_torn or self._in_use, False

    def _look(self) -> None:
        is_all_here = len(self.begins) == len(self.layouts) and not any(self._missing.values())
        if self.state == State.ARRIVING and is_all_here and self._fixed.is_here:
            self.state = State.HERE

    def _view(self, server: int, part: int) -> torch.Tensor:
        view = self._weights[server][part]
        assert view is not None
        return view
