"""What several servers of a synchronous run agree on: of whose gradients each update is made, and who is in each round.

    worker 2 ──> server 0   complete ─┐
    worker 2 ──> server 1   complete ─┴─> server 0 decides ──> servers 0 and 1 make the same update

Every server holds parts of every tensor. If each counted for itself, a worker that dies after it has reached one of
them would be in half of an update. So the first server leads: a worker counts when all servers have all it sent of a
version, and what is decided goes to all of them in one order. With one server the same rules need no message.

A server that is started again says all it knows anew, and is told what was decided meanwhile (`all_together.py`). The
first one keeps its decisions in a file: it goes on after the last one, and waits for the members of that round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.server.weights.updates import Said
from weft.server.workers.rounds import Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all servers do next."""

    version: int
    """The version of the weights of which it is decided."""
    chosen: tuple[int, ...]
    """Workers whose gradients make up its update, in the order in which they are added up; none: there is no update,
    and only the members change."""
    complete: tuple[int, ...]
    """Workers whose gradients of this version are used or dropped now."""
    members: tuple[int, ...]
    """Workers of the round that begins."""
    number: int = field(default=0, compare=False)
    """Among all decisions of a run, from 0."""
    norm: float | None = field(default=None, compare=False)
    """Of the gradient over all servers, where it is clipped and known already."""
    saves: bool = field(default=False, compare=False)
    """All servers take a snapshot after it, so that there is one of the same version of each."""
    said: Said | None = field(default=None, compare=False)
    """What its workers said of their gradients, which a server that has lost some of them cannot know."""


class Agreement:
    """The leader's account of all servers. What they say of an earlier session of a worker changes nothing."""

    def __init__(self, *, num_servers: int, num_workers: int, backups: int, version: int = 0) -> None:
        """`num_workers`: those with which the run begins."""
        self._num_servers, self._num_workers = num_servers, num_workers
        self.rounds = Rounds(backups=backups, version=version)
        self.has_begun = False
        self._joined: dict[tuple[int, int], set[int]] = {}
        """Servers at which each worker's session is there."""
        self._session_of: dict[int, int] = {}
        """Of workers that are there at all servers."""
        self._ready: dict[tuple[int, int, int], set[int]] = {}
        """By worker, session and clock: servers that have all of it."""

    def go_on(self, version: int, members: Sequence[int]) -> None:
        """Begin where an earlier process of this server was, in a round of these members, who are to come again."""
        self.has_begun = True
        self.rounds.go_on(version, members)

    def forget(self, server: int) -> None:
        """A server says anew all it knows."""
        for servers in (*self._joined.values(), *self._ready.values()):
            servers.discard(server)

    def give_up(self, worker: int) -> None:
        """A member that was to come again has not."""
        if worker not in self._session_of:
            self.rounds.leave(worker)

    def has_complete(self, worker: int) -> bool:
        """A worker's gradients of this round count, whether it is there or gone."""
        return worker in self.rounds.completed

    def joined(self, server: int, worker: int, session: int) -> None:
        """A worker, and first weights, are there at a server."""
        servers = self._joined.setdefault((worker, session), set())
        servers.add(server)
        if len(servers) == self._num_servers:
            self._session_of[worker] = session
            self.rounds.join(worker)

    def ready(self, server: int, worker: int, session: int, clock: int) -> None:
        """A server has all that a worker sent of a clock, maybe before the worker is there at all others."""
        if clock >= self.rounds.version and server in self._joined.get((worker, session), ()):
            self._ready.setdefault((worker, session, clock), set()).add(server)
            self._complete_ready()

    def left(self, worker: int, session: int) -> bool | None:
        """A worker is gone; True if its gradients of this round count all the same, because all servers have them, None
        if that was known."""
        if self._joined.pop((worker, session), None) is None:
            if worker in self.rounds.current and worker not in self._session_of:  # it was to come again
                self.rounds.leave(worker)
                return False
            return None
        self._ready = {key: servers for key, servers in self._ready.items() if key[:2] != (worker, session)}
        if self._session_of.get(worker) != session:
            return False
        del self._session_of[worker]
        self.rounds.leave(worker)
        return worker in self.rounds.completed

    def decide(self) -> Decision | None:
        """The next thing to do, if it is known."""
        rounds = self.rounds
        if not self.has_begun:
            if len(self._session_of) < self._num_workers:
                return None
            self.has_begun = True
        version, chosen, complete = rounds.version, rounds.chosen, rounds.completed
        if chosen:
            rounds.advance()
            self._ready = {key: servers for key, servers in self._ready.items() if key[2] > version}
        elif not rounds.begin_if_empty():
            return None
        self._complete_ready()
        return Decision(version=version, chosen=chosen, complete=complete, members=rounds.current)

    def _complete_ready(self) -> None:
        rounds = self.rounds
        current, completed = set(rounds.current), set(rounds.completed)  # made once: there may be hundreds of workers
        for (worker, session, clock), servers in self._ready.items():
            is_whole = clock == rounds.version and len(servers) == self._num_servers
            is_there = worker in current and self._session_of.get(worker) == session
            if is_whole and is_there and worker not in completed:
                rounds.complete(worker)
                completed.add(worker)
