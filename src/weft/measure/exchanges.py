"""One exchange of a given size, which `timing.py` calls repeatedly.

Buffers are made once per size and filled, so that no page is touched for the first time while the clock runs. They are
placed as in training: in the group's shared memory, if it has any.
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
"""Collectives whose root may finish before the others have begun."""

_ITEM_BYTES = 4


def buffer_bytes(num_bytes: int, num_ranks: int) -> int:
    """The size, rounded up to an equal number of float32 values per rank."""
    part = _ITEM_BYTES * num_ranks
    return -(-num_bytes // part) * part


def make_collective(collective: str, group: Group, device: torch.device) -> Callable[[int], Run]:
    """A function from the bytes of the whole buffer (a size that `buffer_bytes` gives) to one call."""

    def make(num_bytes: int) -> Run:
        numel = num_bytes // _ITEM_BYTES
        room = BufferAllocator(group, device, num_bytes=bytes_for([numel], [torch.float32]))
        whole = room.zeros(numel, torch.float32)
        own, other = whole.view(group.size, -1)[group.index], torch.zeros_like(whole)
        part = torch.zeros_like(own)
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": lambda: collectives.all_reduce(whole, group),
            "reduce-scatter": lambda: collectives.reduce_scatter(part, whole, group, received=other),
            "all-gather": lambda: collectives.all_gather(whole, own, group),
            "all-to-all": lambda: collectives.all_to_all(other, whole, group),
            "broadcast": lambda: collectives.broadcast(whole, group),
        }
        return _finished(calls[collective], device, keep=room)

    return make


def make_ping_pong(first: int, second: int, group: Group, device: torch.device) -> Callable[[int], Run]:
    """A message from one rank to another and back: two one-way times. Only these two ranks may call the result."""

    def make(num_bytes: int) -> Run:
        # Zeros stay zeros in every sum; they are written here, because fresh zeros may have no memory yet.
        message, answer = (torch.empty(num_bytes // _ITEM_BYTES, device=device).fill_(0) for _ in range(2))
        is_first = group.ranks[group.index] == first
        other = group.ranks.index(second if is_first else first)

        def exchange() -> None:
            if is_first:
                send(message, group, to=other).wait()
            receive(answer, group, source=other).wait()
            if not is_first:
                send(message, group, to=other).wait()

        return _finished(exchange, device)

    return make


def _finished(call: Callable[[], object], device: torch.device, *, keep: object = None) -> Run:
    """The call and a wait for its result, because a GPU runs it asynchronously. `keep` lives as long as the call."""

    def run(_kept: object = keep) -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run
