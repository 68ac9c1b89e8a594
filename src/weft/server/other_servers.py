"""The servers of a run as one of them knows them: the first one leads, and all others are connected to it."""

from __future__ import annotations

import secrets

from weft.server.protocol.message import Kind, Malformed, Message, pack_object, read_object

TO_LEADER = b""
"""In the place of a peer: the connection to the server that leads."""
MOST_EARLY = 1 << 16


class OtherServers:
    """Connections between servers."""

    def __init__(self, number: int, *, attempt: int = 0) -> None:
        """`attempt`: earlier processes of this server, which are over."""
        self._number, self._attempt = number, attempt
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
        known = self._sessions.get(number, session)
        if number == self._number or (known != session and known[0] >= session[0]):
            return (
                f"there is a server {number} already; every server of a run has a number of its own, from 0 to "
                "[server] shards - 1"
            )
        self._peers[number], self._sessions[number] = peer, session
        self._addresses[number] = address
        return None

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
