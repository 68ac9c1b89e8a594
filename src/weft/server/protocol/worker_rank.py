"""One rank of a worker, as it speaks with all servers: what it says, is told, and may have to say again.

    hello ──> welcome ──> begin, weights ──> pushes, commit ──> begin, weights ...

It has no socket and no clock: messages in, messages out. Weights go straight to where they belong. What was pushed is
kept until the server says that it is applied, by beginning a later clock, and saved, where it would be started again
from a snapshot: a server that has lost it gets it again. What is applied and not saved outlives its step: it is copied.

A clock's weights are *arriving*, then *here* while gradients are computed, then gradients are *sent*. What is said of a
clock that is further already changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum

import torch

from weft.server.protocol.frames import frame_of, tensor_of
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
from weft.server.protocol.optimizer_state import PartState, pack_states, read_states
from weft.server.protocol.settings import MASTER, Settings

LEADER = 0
SESSION_BITS = 32
"""The lower bits of a session, which count the hellos of one worker; the upper ones are drawn at its start."""


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
    ) -> None:
        """`weights`: by server and part, the flat views that weights are written to, and first values are read from;
        None for parts that this rank has not. `worker`: its number, or -1 to be given one. `start`: a random number of
        this start of the worker, the same on all its ranks. `gives_first`: first values are this worker's, where
        servers have none. `first_state`: the optimizer's of a server's part, where training goes on.
        `progress`: step and place in the data of first values. `earlier_starts`: those of this worker that are over,
        for which servers need not wait."""
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
        self.comes_back_s: dict[int, float] = {}
        """Seconds within which a server that died is started again, by what it said."""
        self._weights, self._gives_first, self._job = weights, gives_first, settings.digest
        self._first_state, self._progress, self._earlier_starts = first_state, progress, list(earlier_starts)
        self._states: dict[tuple[int, int], Message] = {}
        """What was answered, by server and bucket, to the question for the optimizer's state."""
        self._missing_states: dict[int, set[int]] = {}
        self._missing: dict[int, set[int]] = {}
        """Buckets of this clock's weights that have not come, by server."""
        self._kept: dict[int, dict[int, list[Message]]] = {}
        """What was pushed, by clock and server; and where a clock was begun that the server did not expect."""
        self._copied = [0] * settings.num_servers
        """By server: what is kept of clocks before this one has memory of its own."""
        self._expected = [
            {bucket for bucket in range(len(one.buckets)) if place in one.holders(bucket)} for one in self.layouts
        ]
        pull = None if settings.pull == MASTER else settings.pull
        self._pull_bytes = [one.frame_bytes(pull) for one in self.layouts]

    def hello(self) -> list[Message]:
        """What is said first; a worker without a number asks the first server for one."""
        servers = range(len(self.layouts)) if self.worker >= 0 else [LEADER]
        return [self._hello_to(server) for server in servers]

    def hello_again(self, server: int) -> list[Message]:
        """To a server whose connection was lost, in the same session: one that was started again goes on with it, and
        for the others nothing changes; one that still has the old connection ends the session."""
        self.welcomed.discard(server)
        return [self._hello_to(server)]

    def hello_anew(self, session: int | None = None) -> list[Message]:
        """In a new session, because a server has ended the old one, and named the next."""
        self.session = self.session + 1 if session is None else session
        self.welcomed = set()
        if self.state == State.ARRIVING:
            self._await_all()
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
        elif message.kind == Kind.STATE:
            self._take_state(message)
        elif message.kind != Kind.ALIVE:
            raise Malformed(f"{message.kind.name} is not for workers")
        return []

    def has_bucket(self, server: int, bucket: int) -> bool:
        """A bucket of this clock's weights is here."""
        return self.state != State.ARRIVING or (server in self.begins and bucket not in self._missing[server])

    @property
    def has_state(self) -> bool:
        """All that was asked of the optimizer's state is here."""
        return not any(self._missing_states.values())

    @property
    def state_versions(self) -> set[int]:
        """The versions of the weights that were asked for with the optimizer's state."""
        return {message.version for message in self._states.values()}

    def take_state(self) -> Iterator[tuple[int, int, torch.Tensor, PartState]]:
        """Server, part, weights and the optimizer's state of all that this rank holds; once."""
        states, self._states = self._states, {}
        for (server, bucket), message in states.items():
            layout = self.layouts[server]
            parts = layout.buckets[bucket]
            read = read_states(message, [layout.parts[part].numel for part in parts], skip=len(parts))
            for place, (part, state) in enumerate(zip(parts, read, strict=True)):
                yield server, part, tensor_of(message.frames[place], layout.dtype(part)), state

    # What this rank says.

    def ask_state(self) -> list[Message]:
        """Ask for the optimizer's state of what this rank holds."""
        self._states = {}
        self._missing_states = {server: set(expected) for server, expected in enumerate(self._expected)}
        return [self._message(Kind.ASK_STATE, server, clock=self.clock) for server in range(len(self.layouts))]

    def push(self, server: int, bucket: int, frames: Sequence[Buffer]) -> Message:
        """A bucket of this clock's gradients, whose memory must stay as it is while it is kept."""
        message = self._message(Kind.PUSH, server, clock=self.clock, bucket=bucket, frames=tuple(frames))
        return self._keep(message)

    def commit(self, said: Commit) -> list[Message]:
        """Nothing more comes of this clock. How many buckets were pushed is filled in."""
        pushed = self._kept.get(self.clock, {})
        found = []
        for server in range(len(self.layouts)):
            num_buckets = sum(one.kind == Kind.PUSH for one in pushed.get(server, ()))
            frame = pack_commit(replace(said, num_buckets=num_buckets))
            found.append(self._keep(self._message(Kind.COMMIT, server, clock=self.clock, frames=(frame,))))
        self.state = State.SENT
        return found

    def alive(self) -> Message:
        """The heartbeat of this session."""
        return self._message(Kind.ALIVE, LEADER)

    def leave(self) -> list[Message]:
        """This worker ends."""
        return [self._message(Kind.LEAVE, server) for server in range(len(self.layouts))]

    def is_kept(self, server: int, clock: int) -> bool:
        """What was pushed to a server in a clock may have to be sent again."""
        return server in self._kept.get(clock, {})

    def _hello_to(self, server: int) -> Message:
        step, position = self._progress
        own = {"worker": self.worker, "step": step, "position": position, "replaces": self._earlier_starts}
        own["clocks"] = list(self._clocks_for(server))
        said = pack_object({**self.settings.as_object(), **own})
        return self._message(Kind.HELLO, server, frames=(said,))

    def _clocks_for(self, server: int) -> tuple[int, int]:
        """The first clock that this rank can send to a server, -1 before it has begun one, and the first one that it
        cannot send again."""
        kept = {clock: servers[server] for clock, servers in self._kept.items() if server in servers}
        pushed = [clock for clock, messages in kept.items() if any(one.kind != Kind.SKIP for one in messages)]
        return min(kept, default=self.clock), max(pushed, default=-1) + 1

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

    def _keep(self, message: Message) -> Message:
        self._kept.setdefault(message.clock, {}).setdefault(message.server, []).append(message)
        return message

    # What servers say.

    def _welcome(self, message: Message) -> list[Message]:
        fields: dict[str, type | tuple[type, ...]] = {"worker": int, "next_clock": int, "has_weights": bool}
        found = read_object(message, {**fields, "comes_back_s": (int, float)})
        self.welcomed.add(message.server)
        self.comes_back_s[message.server] = found["comes_back_s"]
        answers = []
        if self.worker < 0:
            self.worker = found["worker"]
            answers = [self._hello_to(server) for server in range(len(self.layouts)) if server != message.server]
        if not found["has_weights"] and self._gives_first:
            answers += self._first_values(message.server)
        for clock in sorted(self._kept):
            kept = self._kept[clock].get(message.server, []) if clock >= found["next_clock"] else []
            answers += [replace(one, session=self.session, worker=self.worker) for one in kept]
        if self._missing_states.get(message.server):
            answers.append(self._message(Kind.ASK_STATE, message.server, clock=self.clock))
        return answers

    def _take_session(self, session: int) -> list[Message]:
        """All ranks of this worker go on in this session, if it is later than theirs."""
        if session >> SESSION_BITS != self.session >> SESSION_BITS:
            raise Malformed(f"session {session} is of another start than {self.session}")
        return self.hello_anew(session) if session > self.session else []

    def _first_values(self, server: int) -> list[Message]:
        layout = self.layouts[server]
        found = []
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
            comes_again = any(clock >= message.clock and message.server in self._kept[clock] for clock in self._kept)
            return self._skip(behind) if is_arriving and not comes_again else []
        begin = read_begin(message)
        behind = []
        if message.clock > self.clock:
            behind = list(self.begins) if is_arriving else []
            self.clock, self.state = message.clock, State.ARRIVING
            self._await_all()
        self.begins[message.server], self.versions[message.server] = begin, message.version
        self._missing[message.server] = set(self._expected[message.server])
        self._keep_longer(message.server, message.clock, begin.saved)
        self._look()
        return self._skip(behind)

    def _keep_longer(self, server: int, begun: int, saved: int) -> None:
        """What a server has applied, all before a clock that is begun, and not saved, is kept in memory of its own."""
        for clock in [one for one in self._kept if one < begun]:
            kept = self._kept[clock]
            if clock < saved:
                kept.pop(server, None)
            elif clock >= self._copied[server] and server in kept:
                kept[server] = [replace(one, frames=tuple(map(bytes, one.frames))) for one in kept[server]]
            if not kept:
                del self._kept[clock]
        self._copied[server] = begun

    def _skip(self, servers: Sequence[int]) -> list[Message]:
        return [self._keep(self._message(Kind.SKIP, server, clock=self.clock)) for server in servers]

    def _take(self, message: Message) -> None:
        server, bucket = message.server, message.bucket
        is_expected = message.clock == self.clock and self.state == State.ARRIVING and server in self.begins
        if not is_expected or bucket not in self._missing[server]:
            return
        layout, lengths = self.layouts[server], self._pull_bytes[server][bucket]
        if tuple(len(one) for one in message.frames) != lengths:
            raise Malformed(f"bucket {bucket} of weights of {[len(one) for one in message.frames][:4]} bytes")
        with torch.no_grad():
            for part, frame in zip(layout.buckets[bucket], message.frames, strict=True):
                dtype = layout.dtype(part) if self.settings.pull == MASTER else self.settings.pull
                self._view(server, part).copy_(tensor_of(frame, dtype))
        self._missing[server].discard(bucket)
        self._look()

    def _take_state(self, message: Message) -> None:
        server, bucket = message.server, message.bucket
        if bucket not in self._missing_states.get(server, ()):
            return
        lengths = self.layouts[server].frame_bytes()[bucket]
        if tuple(len(one) for one in message.frames[: len(lengths)]) != lengths:
            raise Malformed(f"bucket {bucket} of weights and state of {[len(one) for one in message.frames][:4]} bytes")
        self._states[server, bucket] = message
        self._missing_states[server].discard(bucket)

    def _await_all(self) -> None:
        self.begins = {}
        self._missing = {server: set(expected) for server, expected in enumerate(self._expected)}

    def _look(self) -> None:
        if len(self.begins) == len(self.layouts) and not any(self._missing.values()):
            self.state = State.HERE

    def _view(self, server: int, part: int) -> torch.Tensor:
        view = self._weights[server][part]
        assert view is not None
        return view
