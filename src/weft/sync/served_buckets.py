"""Where in a rank's pieces the parts of servers lie, and which messages of gradients it sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.parallel.zero.flat_parameters import Piece
from weft.server.protocol.layout import ServerLayout

Place = tuple[int, int, int]
"""Number of a piece, start and stop in it, flattened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingBucket:
    """What this rank sends in one message of gradients: ranges of its flattened pieces."""

    server: int
    number: int
    parts: tuple[Place, ...]


def places_of(layout: ServerLayout, number_of: Mapping[str, int]) -> Iterator[Place | None]:
    """What each part of a server is here; None for those of other ranks."""
    for part in layout.parts:
        number = number_of.get(layout.settings.tensors[part.tensor].name)
        yield None if number is None else (number, part.start, part.stop)


def buckets_of(
    pieces: Sequence[Piece], layouts: Sequence[ServerLayout], places: Sequence[Sequence[Place | None]]
) -> dict[str, set[tuple[int, int]]]:
    """The messages, by server and number, that the weights of each piece come in."""
    found: dict[str, set[tuple[int, int]]] = {piece.name: set() for piece in pieces}
    for layout, of_server in zip(layouts, places, strict=True):
        for bucket, parts in enumerate(layout.buckets):
            for place in (of_server[part] for part in parts):
                if place is not None:
                    found[pieces[place[0]].name].add((layout.server, bucket))
    return found


def outgoing_buckets(
    layouts: Sequence[ServerLayout], number_of: Mapping[str, int], place: int
) -> Iterator[OutgoingBucket]:
    """The buckets that a rank speaks for."""
    for layout in layouts:
        for bucket, members in enumerate(layout.buckets):
            if layout.owners[bucket] == place:
                parts = [layout.parts[member] for member in members]
                names = [layout.settings.tensors[part.tensor].name for part in parts]
                ranges = [(number_of[name], part.start, part.stop) for name, part in zip(names, parts, strict=True)]
                yield OutgoingBucket(server=layout.server, number=bucket, parts=tuple(ranges))
