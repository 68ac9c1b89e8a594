"""The servers of a run as one of them knows them: the first one leads, and all others are connected to it."""

from __future__ import annotations

import secrets
from collections import deque
from typing import Any

from weft.server.protocol.message import Kind, Malformed, Message, pack_object, read_object

TO_LEADER = b""
"""In the place of a peer: the connection to the server that leads."""
MOST_EARLY = 1 << 16


class OtherServers:
    """Connections between servers."""

    def __init__(self, number: int, *, attempt: int = 0, num_servers: int | None = None) -> None:
        """`attempt`: earlier processes of this server, which are over. `num_servers`: of the plan, if it is known."""
        self._number, self._attempt = number, attempt
        self.num_servers = num_servers
        self.outbox: deque[Message] = deque()
        """What this server says to others, besides what its mode has to say."""
        self.address = ""
        """Where this server listens, which its sockets say."""
        self._session = secrets.randbits(63)
        self._peers: dict[int, bytes] = {}
        self._sessions: dict[int, tuple[int, int]] = {}
        """Of each server: its attempt, and a number that its process has drawn."""
        self._addresses: dict[int, str] = {}
        self._early: list[Message] = []

    def introduction(self, num_known: int = 0) -> Message:
        """What a server says first to the one that leads. `num_known`: the decisions that it knows."""
        said = pack_object({"address": self.address, "attempt": self._attempt, "num_known": num_known})
        return Message(kind=Kind.SERVES, place=self._number, session=self._session, frames=(said,))

    @property
    def addresses(self) -> list[str]:
        """Where the servers listen that have said so, in their order, this one among them."""
        found = {**self._addresses, self._number: self.address}
        return [found[number] for number in sorted(found)]

    def meet(self, peer: bytes, message: Message) -> str | None:
        """Another server says who it is; returns why it cannot be."""
        if self._number != 0:
            raise Malformed("an introduction is for the first server")
        said = read_object(message, {"address": str, "attempt": int, "num_known": int})
        number, address, session = message.place, said["address"], (said["attempt"], message.session)
        if self.num_servers is not None and number >= self.num_servers:
            return (
                f"server {number} is one too many: the plan of this run has [server] shards = {self.num_servers}, and "
                f"its servers are 0 to {self.num_servers - 1}; start this one with the same plan"
            )
        known = self._sessions.get(number, session)
        if number == self._number or (known != session and known[0] >= session[0]):
            return (
                f"there is a server {number} already, and two servers of one shard cannot be; every server of a run "
                "has a number of its own, from 0 to [server] shards - 1 (--servers)"
            )
        self._peers[number], self._sessions[number] = peer, session
        self._addresses[number] = address
        return None

    def say_ended(self, worker: int, session: int, *, to: int) -> None:
        """A worker has said that it ends."""
        ended = Message(kind=Kind.ENDED, server=to, place=self._number, worker=worker, session=session)
        self.outbox.append(ended)

    def pass_on_ended(self, worker: int, session: int) -> None:
        """Say it to those that may not know it: the first server tells all others."""
        for number in sorted(self._peers) if self._number == 0 else [0]:
            self.say_ended(worker, session, to=number)

    # Started again.

    def as_plain(self) -> list[Any]:
        """What `go_on` needs."""
        return [[number, *session, self._addresses[number]] for number, session in sorted(self._sessions.items())]

    def go_on(self, plain: list[Any]) -> None:
        """The other servers are those that an earlier process of this one knew."""
        for number, attempt, session, address in plain:
            self._sessions[number], self._addresses[number] = (attempt, session), address

    def peer_of(self, number: int) -> bytes | None:
        """The connection to a server; None if it has none yet."""
        return self._peers.get(number) if self._number == 0 else TO_LEADER

    def require(self, peer: bytes, message: Message) -> Message:
        """A message, which must be of the server that it claims to be of; raises Malformed."""
        is_known = message.place in self._peers if self._number == 0 else message.place == 0
        if not is_known or self.peer_of(message.place) != peer or message.server != self._number:
            raise Malformed(f"{message.kind.name} by one that is not server {message.place}")
        return message

    def keep_early(self, message: Message) -> None:
        """Keep what another server says before this one knows the settings of the run."""
        if len(self._early) == MOST_EARLY:
            raise Malformed("too much before the run has begun")
        self._early.append(message)

    def take_early(self) -> list[Message]:
        early, self._early = self._early, []
        return early
