"""NCCL's rules without NCCL: what hosts and streams of ranks do, played until everything ended or nothing moves.

    host       issues its calls in order and never waits, but for the first message on a way that is not open yet: there
               both hosts wait until the other comes
    compute    one stream per rank: passes, and waits for exchanges, in order
    exchanges  one stream per rank and communicator (or one for all), in order. An exchange begins once its rank has
               computed what was issued before it, and ends only together with the other ranks' parts: a send with its
               receive, a collective with all. They match in order of issue, without names or tags.

An answer of `play` is None, or says why the ranks cannot go on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Something computed."""

    name: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """This rank's part of an exchange."""

    group: Hashable
    """The communicator."""
    side: str
    """send, receive, or collective."""
    name: Hashable
    """What travels: both sides must mean the same."""
    ranks: tuple[int, ...]
    """The ranks that take part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The compute stream waits for the latest exchange of this name."""

    group: Hashable
    side: str
    name: Hashable


Call = Pass | Exchange | Wait


@dataclass(slots=True)
class _Issued:
    exchange: Exchange
    after: int
    """Entries of the compute stream that come first."""
    is_over: bool = False


@dataclass(slots=True)
class _Rank:
    calls: deque[Call]
    compute: list[Pass | _Issued] = field(default_factory=list)
    num_computed: int = 0
    streams: defaultdict[Hashable, deque[_Issued]] = field(default_factory=lambda: defaultdict(deque))
    latest: dict[tuple[Hashable, str, Hashable], _Issued] = field(default_factory=dict)


def play(
    programs: Sequence[Iterable[Call]],
    *,
    one_stream: bool = False,
    is_open: bool = True,
    host_waits_for: str = "nothing",
) -> str | None:
    """Play every rank's calls; `one_stream`: exchanges of a rank share one; `is_open`: all ways are open already.

    `host_waits_for`: what a host waits for before every pass: "nothing", its "stream" of passes, as when a value is
    read, or its "device", with all that was issued to it, as when memory is given back.
    """
    ranks = [_Rank(deque(calls)) for calls in programs]
    opened: set[Hashable] = set()
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved |= _issue(rank, ranks, None if is_open else opened, host_waits_for, one_stream=one_stream)
            moved |= _compute(rank)
        for rank in ranks:
            for stream in rank.streams.values():
                while stream:
                    parts = _matching(stream[0], ranks, one_stream=one_stream)
                    if parts is None:
                        break
                    names = {part.exchange.name for part in parts}
                    if len(names) > 1:
                        group = stream[0].exchange.group
                        return f"on {group} these are taken for each other: {', '.join(sorted(map(str, names)))}"
                    for part, place in zip(parts, stream[0].exchange.ranks, strict=True):
                        part.is_over = True
                        ranks[place].streams[None if one_stream else part.exchange.group].popleft()
                    moved = True
    stuck = [_said(number, rank) for number, rank in enumerate(ranks)]
    return "; ".join(filter(None, stuck)) or None


def _issue(
    rank: _Rank, ranks: Sequence[_Rank], opened: set[Hashable] | None, host_waits_for: str, *, one_stream: bool
) -> bool:
    """Let a host go on as far as it can."""
    moved = False
    while rank.calls:
        call = rank.calls[0]
        if isinstance(call, Exchange) and opened is not None:
            way = (call.group, call.ranks)
            if way not in opened:
                heads = [ranks[other].calls[0] if ranks[other].calls else None for other in call.ranks]
                if any(not isinstance(head, Exchange) or (head.group, head.ranks) != way for head in heads):
                    return moved
                opened.add(way)
        if isinstance(call, Pass) and host_waits_for != "nothing":
            is_busy = host_waits_for == "device" and any(rank.streams.values())
            if is_busy or rank.num_computed < len(rank.compute):
                return moved
        rank.calls.popleft()
        moved = True
        if isinstance(call, Pass):
            rank.compute.append(call)
        elif isinstance(call, Wait):
            rank.compute.append(rank.latest[call.group, call.side, call.name])
        else:
            issued = _Issued(call, len(rank.compute))
            rank.streams[None if one_stream else call.group].append(issued)
            rank.latest[call.group, call.side, call.name] = issued
    return moved


def _compute(rank: _Rank) -> bool:
    before = rank.num_computed
    while rank.num_computed < len(rank.compute):
        entry = rank.compute[rank.num_computed]
        if isinstance(entry, _Issued) and not entry.is_over:
            break
        rank.num_computed += 1
    return rank.num_computed > before


def _matching(first: _Issued, ranks: Sequence[_Rank], *, one_stream: bool) -> list[_Issued] | None:
    """The parts of the exchange that is next on a stream, by rank; None if one is not next, or not ready."""
    parts = []
    for place in first.exchange.ranks:
        stream = ranks[place].streams[None if one_stream else first.exchange.group]
        if not stream or stream[0].after > ranks[place].num_computed:
            return None
        exchange = stream[0].exchange
        if (exchange.group, exchange.ranks) != (first.exchange.group, first.exchange.ranks):
            return None
        parts.append(stream[0])
    sides = [part.exchange.side for part in parts]
    return parts if sides == ["collective"] * len(parts) or sorted(sides) == ["receive", "send"] else None


def _said(number: int, rank: _Rank) -> str:
    """What a rank waits for."""
    told = []
    if rank.calls:
        told.append(f"its host in {rank.calls[0]}")
    if rank.num_computed < len(rank.compute):
        entry = rank.compute[rank.num_computed]
        assert isinstance(entry, _Issued)
        told.append(f"its compute stream for {entry.exchange.side} of {entry.exchange.name}")
    told += [
        f"{stream[0].exchange.group} in {stream[0].exchange.side} of {stream[0].exchange.name}"
        for stream in rank.streams.values()
        if stream
    ]
    return f"rank {number} waits: {', '.join(told)}" if told else ""
