"""What a rank has pushed and may have to send again: a server that dies has lost what is in none of its snapshots.

What is pushed in a clock stays where it lies until the server has begun the next one; from then on, if no snapshot has
it yet, it has memory of its own.
"""

from __future__ import annotations

from dataclasses import replace

from weft.server.protocol.message import Kind, Message


class KeptMessages:
    """By clock and server; and where a clock was begun that the server did not expect."""

    def __init__(self, num_servers: int) -> None:
        self._kept: dict[int, dict[int, list[Message]]] = {}
        self._copied = [0] * num_servers
        """By server: what is kept of clocks before this one has memory of its own."""

    @property
    def clocks(self) -> list[int]:
        """Those of which something is kept, in order."""
        return sorted(self._kept)

    def keep(self, message: Message) -> Message:
        self._kept.setdefault(message.clock, {}).setdefault(message.server, []).append(message)
        return message

    def of(self, server: int, clock: int) -> list[Message]:
        """What was sent to a server in a clock."""
        return self._kept.get(clock, {}).get(server, [])

    def has_from(self, server: int, clock: int) -> bool:
        """Something is kept for a server of this clock, or of a later one."""
        return any(one >= clock and server in self._kept[one] for one in self._kept)

    def clocks_for(self, server: int, *, clock: int) -> tuple[int, int]:
        """The first clock that this rank can send to a server, and the first one that it cannot send again. `clock`:
        that of the rank, -1 before it has begun one."""
        kept = {one: servers[server] for one, servers in self._kept.items() if server in servers}
        pushed = [one for one, messages in kept.items() if any(sent.kind != Kind.SKIP for sent in messages)]
        return min(kept, default=clock), max(pushed, default=-1) + 1

    def begin(self, server: int, *, begun: int, saved: int) -> None:
        """A server has begun a clock: it has applied all before that, and saved all before another one."""
        for clock in [one for one in self._kept if one < begun]:
            kept = self._kept[clock]
            if clock < saved:
                kept.pop(server, None)
            elif clock >= self._copied[server] and server in kept:
                kept[server] = [replace(one, frames=tuple(map(bytes, one.frames))) for one in kept[server]]
            if not kept:
                del self._kept[clock]
        self._copied[server] = begun
