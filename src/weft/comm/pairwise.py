"""One message from every rank to every other, all under way at once: what direct exchanges are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Messages:
    """Sends and receives under way, waited for together."""

    __slots__ = ("_works",)

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def exchange(
    places: Sequence[torch.Tensor],
    messages: Sequence[torch.Tensor],
    *,
    ranks: Sequence[int],
    index: int,
    handle: dist.ProcessGroup | None,
) -> Messages:
    """Send message k to rank k and receive into place k from it, for every other rank, nearest neighbours first.

    `ranks` are the global numbers of all, of which this one is at `index`; its own place and message are not used.
    """
    works, size = [], len(ranks)
    for distance in range(1, size):
        source, target = (index - distance) % size, (index + distance) % size
        works.append(dist.irecv(places[source], ranks[source], handle))
        works.append(dist.isend(messages[target], ranks[target], handle))
    assert all(works)
    return Messages(works)  # type: ignore[arg-type]
