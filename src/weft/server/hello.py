"""How a server answers a rank's hello: which session of its worker it may be in, and what the worker finds there.

    rank 0   hello 5 ─────────────────────────────────── given up, 6 is next ── hello 6 ──> welcome
    rank 1   hello 5 ── connection lost ── hello 5 again ── given up, 6 is next ── hello 6 ──> welcome, worker is there

A session is of the whole worker. What was on its way over a connection that is lost is gone, so a rank that comes by
another connection ends the session here, and all ranks are told the number of the next one. A number only grows: a rank
in an earlier session than its worker's is told the later one, and a hello in a later one ends the earlier. Servers that
end a session at the same time name the same next one, so ranks cannot expel each other for ever. A server that was
started again knows of no session, and takes the one that its worker has everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weft.errors import LaunchError, WeftError
from weft.server.outgoing import Reply
from weft.server.protocol.message import Kind, Malformed, Message, pack_object, read_object
from weft.server.protocol.settings import difference, read_settings
from weft.server.protocol.worker_rank import SESSION_BITS
from weft.server.recovery import read_clocks

if TYPE_CHECKING:
    from weft.server.server import ParameterServer

MOST_WORKERS = 1 << 20


def answer_hello(server: ParameterServer, peer: bytes, message: Message, now_s: float) -> Iterator[Reply]:
    """A rank joins, is to come later or in another session, or is refused. Raises Malformed."""
    settings = read_settings(message)
    said = read_object(message, {"worker": int, "step": int, "position": int, "replaces": list, "clocks": list})
    asked, progress, clocks = said["worker"], (said["step"], said["position"]), read_clocks(said["clocks"])
    if not -1 <= asked < MOST_WORKERS or not all(0 <= one < 1 << 63 for one in progress):
        raise Malformed(f"worker {asked} at {progress}")
    session, members = message.session, server.members
    try:
        if server.settings is None:
            server.begin(settings)
            members = server.members
        elif (problem := difference(server.settings, settings)) is not None:
            raise LaunchError(problem)
        if (here := members.session_of(asked)) >= 0:
            if here >> SESSION_BITS in said["replaces"]:
                server.leave(asked)
            elif members.is_earlier(asked, session):
                server.leave(asked, later=session)
            elif members.comes_again(asked, message.place, session=session, peer=peer):
                server.leave(asked)
            yield from server.converse()
        if members.is_over_for(asked, session):
            yield server.given_up(peer, asked, session)
            return
        if asked in server.leaving:
            yield Reply(peer=peer, message=server.message(Kind.LATER, asked, session=session))
            return
        known = members.who(peer)
        free = known[0] if known is not None else members.free_number()
        worker = asked if asked >= 0 else free
        is_whole = members.hello(worker, message.place, session=session, peer=peer, now_s=now_s, clocks=clocks)
    except WeftError as error:
        server.refused["refused"] += 1
        yield server.refusal(peer, str(error))
        return
    assert server.layout is not None
    server.recovery.see(worker, session)
    server.first_progress = max(server.first_progress, progress)
    arrivals = server.arrivals_of(worker)
    welcome = {
        "worker": worker,
        "next_clock": arrivals.next_clock,
        "version": server.version,
        "has_weights": server.store is not None,
        "comes_back_s": server.recovery.comes_back_s,
        "shared": None
        if server.layout is None
        else server.shares.offer(server.layout, worker, message.place, said.get("host")),
    }
    yield Reply(peer=peer, message=server.message(Kind.WELCOME, worker, frames=(pack_object(welcome),)))
    if is_whole:
        server.join(worker)
