"""One message from every rank to every other, all under way at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(slots=True)
class WaitAll:
    """Exchanges that are waited for as one."""

    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def exchange(
    places: Sequence[torch.Tensor],
    messages: Sequence[torch.Tensor],
    *,
    ranks: Sequence[int],
    index: int,
    handle: dist.ProcessGroup | None,
) -> WaitAll:
    """Send message k to rank k and receive into place k from it, for every other rank, nearest neighbours first.

    `ranks` are global numbers, this rank's at `index`; its own place and message are not used.
    """
    works, size = [], len(ranks)
    for distance in range(1, size):
        source, target = (index - distance) % size, (index + distance) % size
        works.append(dist.irecv(places[source], ranks[source], handle))
        works.append(dist.isend(messages[target], ranks[target], handle))
    assert all(works)
    return WaitAll(works)
