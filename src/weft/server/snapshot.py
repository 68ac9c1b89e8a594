"""A server's state at one moment, as the messages with which a run begins, and where everybody is.

    settings   ─ the first hello would say them
    fixed      ─ INITIAL_FIXED, and
    buckets    ─ INITIAL_STATE and INITIAL, as the first worker sends them
    the rest   ─ plain numbers: version, the next clock of each worker, decisions made, what workers were told

So a server begins from a snapshot as from a first worker. Weights are those of the server, lent until they are in the
file; the optimizer's state, which updates change in place, is copied. The snapshots of all servers, of one version,
make a checkpoint (`checkpoint/server_snapshots.py`): settings say where each flat part lies in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.errors import LaunchError
from weft.server.protocol.frames import frame_of
from weft.server.protocol.message import Buffer, Kind, Malformed, Message
from weft.server.protocol.optimizer_state import pack_states
from weft.server.protocol.settings import settings_of_object
from weft.server.server import ParameterServer
from weft.server.weights.updates import Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a server needs to go on."""

    plain: dict[str, Any]
    """Numbers."""
    buckets: tuple[tuple[tuple[Buffer, ...], tuple[Buffer, ...]], ...]
    """The frames of each bucket: the optimizer's state, then the weights."""
    fixed: tuple[tuple[Buffer, ...], ...] = ()
    """The frames of each bucket of what is not trained, which is the same in all snapshots."""

    @property
    def next_clocks(self) -> dict[int, int]:
        """Of each worker: the first clock that is not in here."""
        return dict(self.plain["next_clocks"])

    @property
    def version(self) -> int:
        """Updates that are in here."""
        return int(self.plain["version"])

    @property
    def num_made(self) -> int:
        """Decisions of several servers that are in here."""
        return int(self.plain["mode"].get("num_made", 0))


def can_take(server: ParameterServer) -> bool:
    """The server has weights, and is not in the middle of an update."""
    return server.store is not None and server.mode is not None and not server.mode.is_in_update


def take(server: ParameterServer) -> Snapshot:
    """The state of a server, whose weights are to stay as they are while it is used (`PartStore.lend`)."""
    store, updates, mode, layout = server.store, server.updates, server.mode, server.layout
    assert store is not None and updates is not None and mode is not None and layout is not None
    plain = {
        "settings": layout.settings.as_object(),
        "version": store.version,
        "staleness": sorted(store.staleness.items()),
        "next_clocks": sorted(next_clocks_of(server).items()),
        "mode": mode.as_plain(),
        "step": updates.step,
        "position": updates.position,
        "num_skipped": updates.num_skipped,
        "told": asdict(updates.last),
        "told_each": [[worker, asdict(one)] for worker, one in updates.told_each.items()],
        "num_tickets": server.num_tickets,
        "num_joined": server.members.num_joined,
    }
    weights = [one.detach() for one in store.parameters]
    return Snapshot(
        plain=plain,
        buckets=tuple(
            (
                tuple(pack_states([store.copy_of_state(part) for part in parts])),
                tuple(frame_of(weights[part]) for part in parts),
            )
            for parts in layout.buckets
        ),
        fixed=store.fixed,
    )


def note_saved(server: ParameterServer, snapshot: Snapshot) -> None:
    """A snapshot of this server is in a file: workers need not keep what is in it."""
    assert server.mode is not None
    server.recovery.saved(snapshot.next_clocks)
    server.mode.saved(snapshot.num_made)


def next_clocks_of(server: ParameterServer) -> dict[int, int]:
    """Of each worker: the first clock that is not applied, or left out."""
    return {worker: one.next_clock for worker, one in server.arrivals.items()}


def go_on(server: ParameterServer, snapshot: Snapshot, records: Sequence[Mapping[str, Any]] = ()) -> None:
    """Make a new server what an earlier one was. `records`: what that one has noted of its decisions, in their order.
    Raises LaunchError for a snapshot that is not of this server."""
    plain = snapshot.plain
    try:
        server.begin(settings_of_object(plain["settings"]))
        assert server.layout is not None
        for bucket, frames in enumerate(snapshot.fixed):
            place = server.layout.fixed_holders(bucket)[0]
            server.take_first(Message(kind=Kind.INITIAL_FIXED, place=place, bucket=bucket, frames=frames))
        for bucket, (state, weights) in enumerate(snapshot.buckets):
            place = server.layout.owners[bucket]
            for kind, frames in ((Kind.INITIAL_STATE, state), (Kind.INITIAL, weights)):
                server.take_first(Message(kind=kind, place=place, bucket=bucket, frames=frames))
        server.start_if_ready()  # a server may have no part of anything
        _set_numbers(server, snapshot, records)
    except Malformed as problem:
        raise LaunchError(f"server {server.number} cannot go on from its snapshot: {problem}") from None


def _set_numbers(server: ParameterServer, snapshot: Snapshot, records: Sequence[Mapping[str, Any]]) -> None:
    plain = snapshot.plain
    store, updates, mode = server.store, server.updates, server.mode
    assert store is not None and updates is not None and mode is not None
    store.version = plain["version"]
    store.staleness.update(dict(plain["staleness"]))
    updates.step, updates.position, updates.num_skipped = plain["step"], plain["position"], plain["num_skipped"]
    updates.last = Told(**plain["told"])
    updates.told_each = {worker: Told(**one) for worker, one in plain["told_each"]}
    for worker, clock in snapshot.next_clocks.items():
        server.arrivals_of(worker).begin_with(clock)
    server.num_tickets, server.members.num_joined = plain["num_tickets"], plain["num_joined"]
    server.recovery.saved(snapshot.next_clocks)
    mode.go_on(plain["mode"], records)
