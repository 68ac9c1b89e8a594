"""The message about ranks that wait for each other: who waits where, for whom, and what those do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.comm.failures.rank_status import RankStatus
from weft.comm.failures.stuck_exchanges import Exchange
from weft.units import name_ranks

_MOST_DESCRIBED = 8


def describe_different_calls(statuses: Mapping[int, RankStatus]) -> str | None:
    """The message if ranks make different collective calls; None if they make the same ones, as far as is known."""
    newest = max(one.num_calls for one in statuses.values())
    # Of a thousand ranks nearly all have made the same calls.
    kinds = {(one.num_calls, one.history, one.has_ended): one for one in statuses.values()}.values()
    for number in range(max(1, newest - 128), newest + 1):
        names_made = {_call_made(one, number) for one in kinds}
        if len(made := names_made - {""}) > 1 or ("ended" in names_made and made):
            break
    else:
        return None
    names = {rank: _call_made(one, number) for rank, one in statuses.items()}
    by_text: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        made_then = names[rank]
        at = f" ({status.place.line})" if status.place.user else ""
        if made_then == "ended":
            text = "{ranks} ended normally"
        elif status.call:
            text = "{ranks} {is_in} " + status.call + at
        elif made_then:
            text = "{ranks} {was_in} " + made_then + at + (" and ended" if status.has_ended else "")
        else:
            continue
        if status.call and made_then not in ("", "ended", status.call):
            text += f", after {made_then}"
        by_text.setdefault(text, []).append(rank)
    said = ", ".join(_with_ranks(text, ranks) for text, ranks in list(by_text.items())[:_MOST_DESCRIBED])
    return (
        f"the ranks make different calls: {said}. Every rank must make the same ones in the same order: none under "
        "`if rank == 0:`, and as many batches on every rank"
    )


def _with_ranks(text: str, ranks: Sequence[int]) -> str:
    one = len(ranks) == 1
    return text.format(
        ranks=name_ranks(ranks), is_in="is in" if one else "are in", was_in="was in" if one else "were in"
    )


def _call_made(status: RankStatus, number: int) -> str:
    if status.has_ended and number > status.num_calls:
        return "ended"
    return status.call_number(number)


def describe_wait(
    rank: int, statuses: Mapping[int, RankStatus], silent: Mapping[int, str], *, unknown: str = "no answer"
) -> str:
    """The message about a wait: where its ranks are, then the ranks that those wait for.

    `rank`: the one that noticed; `statuses`: of each rank that answered; `silent`: what is known of others,
    and `unknown` of the rest.
    """
    mine = statuses[rank]
    stuck = mine.exchanges.waiting[0] if mine.exchanges.waiting else None
    everyone = sorted({*statuses, *silent})
    awaited = _awaited(stuck) if stuck is not None else everyone
    by_status: dict[str, list[int]] = {}
    to_explain, seen = [(one, stuck) for one in awaited], {rank}
    while to_explain:
        other, missed = to_explain.pop(0)
        if other in seen:
            continue
        seen.add(other)
        status = statuses.get(other)
        text = silent.get(other, unknown) if status is None else _describe_status(status, stuck, missed)
        by_status.setdefault(text, []).append(other)
        if status is not None and status.exchanges.waiting:
            to_explain += [(one, status.exchanges.waiting[0]) for one in _awaited(status.exchanges.waiting[0])]
    where = mine.where
    if stuck is None:
        head = f"rank {rank} has been {where} for {mine.call_s:,.0f} s"
    else:
        head = f"rank {rank} has waited {stuck.waited_s:,.0f} s in {stuck}" + (f", {where}" if mine.call else "")
    parts = [f"{name_ranks(ranks)}: {text}" for text, ranks in list(by_status.items())[:_MOST_DESCRIBED]]
    return "; ".join([head, *parts])


def _awaited(exchange: Exchange) -> Sequence[int]:
    return exchange.awaits or exchange.ranks


def _is_same(one: Exchange, other: Exchange) -> bool:
    return (one.group, one.number) == (other.group, other.number) and not one.awaits and not other.awaits


def _describe_status(status: RankStatus, stuck: Exchange | None, missed: Exchange | None) -> str:
    """Where a rank is that others wait for in the exchange it missed."""
    waiting = status.exchanges.waiting
    if stuck is not None and any(_is_same(one, stuck) for one in waiting):
        return "waiting in it too"
    if waiting:
        return f"waiting in {waiting[0]}" + (f", {status.where}" if status.call else "")
    if status.has_ended:
        return status.where
    last = None if missed is None else status.exchanges.latest.get(missed.group)
    number = f" (its last one along {missed.name} was number {last})" if missed is not None and last else ""
    return f"in no exchange{number}" + (f", {status.where}" if status.where else "")
