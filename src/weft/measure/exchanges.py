"""One exchange of a given size, ready to be called again and again: what `timing.py` times.

Buffers are made once a size and filled, so that no page is touched for the first time while the clock runs. They lie
where training has them: in memory that the group shares, if it does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.comm import collectives
from weft.comm.exchange_buffers import BufferAllocator, bytes_for
from weft.comm.group import Group
from weft.comm.p2p import receive, send
from weft.measure.timing import Run

TIMED = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")
"""The collectives that training uses."""

UNCHAINED = ("broadcast",)
"""Those whose root may be done before the others have begun."""

_ITEM_BYTES = 4


def buffer_bytes(num_bytes: int, num_ranks: int) -> int:
    """The size nearest above that has an equal part of whole float32 numbers for each rank."""
    part = _ITEM_BYTES * num_ranks
    return -(-num_bytes // part) * part


def make_collective(collective: str, group: Group, device: torch.device) -> Callable[[int], Run]:
    """A function from the bytes of the whole buffer (a size that `buffer_bytes` gives) to one call."""

    def make(num_bytes: int) -> Run:
        numel = num_bytes // _ITEM_BYTES
        room = BufferAllocator(group, device, num_bytes=bytes_for([numel], [torch.float32]))
        whole = room.zeros(numel, torch.float32)
        return _finished(_call(collective, whole, group), device, keep=room)

    return make


def _call(collective: str, whole: torch.Tensor, group: Group) -> Callable[[], object]:
    match collective:
        case "all-reduce":
            return lambda: collectives.all_reduce(whole, group)
        case "broadcast":
            return lambda: collectives.broadcast(whole, group)
        case "all-gather":
            own = whole.view(group.size, -1)[group.index]
            return lambda: collectives.all_gather(whole, own, group)
        case "reduce-scatter":
            part, received = torch.zeros_like(whole[: len(whole) // group.size]), torch.zeros_like(whole)
            return lambda: collectives.reduce_scatter(part, whole, group, received=received)
        case "all-to-all":
            output = torch.zeros_like(whole)
            return lambda: collectives.all_to_all(output, whole, group)
    raise ValueError(f"{collective} is not timed")


def make_ping_pong(first: int, second: int, group: Group, device: torch.device) -> Callable[[int], Run]:
    """A message from one rank to another and back: two one-way times. Only these two may call what this gives."""

    def make(num_bytes: int) -> Run:
        message, answer = _filled(num_bytes, device), _filled(num_bytes, device)
        is_first = group.ranks[group.index] == first
        other = group.ranks.index(second if is_first else first)

        def give() -> None:
            send(message, group, to=other).wait()
            receive(answer, group, source=other).wait()

        def give_back() -> None:
            receive(answer, group, source=other).wait()
            send(message, group, to=other).wait()

        return _finished(give if is_first else give_back, device)

    return make


def _filled(num_bytes: int, device: torch.device) -> torch.Tensor:
    # Zeros stay zeros however often they are added up; written here, for fresh zeros may have no memory yet.
    return torch.empty(num_bytes // _ITEM_BYTES, device=device).fill_(0)


def _finished(call: Callable[[], object], device: torch.device, *, keep: object = None) -> Run:
    """The call, until its result is there: on a GPU it is only put on a stream. `keep` lives as long as the call."""

    def run(_kept: object = keep) -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run
