"""Hierarchical collectives for ranks on several hosts: inside each host through its memory, then between hosts.

The network carries what one rank per host would exchange, an R-th of the bytes with R ranks per host, and every rank
sends a slice of it, so that all connections are used at once.

    all-reduce       sum my slice in the host | all-reduce it with ranks of my place on other hosts | copy the others
    reduce-scatter   sum in the host what goes to ranks of my place anywhere | reduce-scatter that between hosts
    all-gather       gather between ranks of my place | share all that in the host

For small tensors, reductions other than sums, and hosts with unequal numbers of ranks, the first rank of each host
exchanges for all of them. Other collectives have one level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm.pairwise import WaitAll, exchange
from weft.comm.shared_memory.reduction import REDUCE_OPS, Reduction, add_into
from weft.comm.shared_memory.transport import SMALL_BYTES, SharedTransport
from weft.comm.shared_memory.worker import Worker


class TwoLevel:
    """The ranks of a group by host, seen from one of them."""

    def __init__(
        self,
        places: Sequence[Sequence[int]],
        index: int,
        *,
        wire: SharedTransport | None,
        across: dist.ProcessGroup | None,
        across_ranks: Sequence[int],
        name: str,
    ) -> None:
        """`places`: each host's ranks, as places in the group; `index`: this rank's place in the group.

        `wire` is that of this host's ranks, None if there is only one. `across` joins the ranks with this one's place
        on their hosts, of global numbers `across_ranks`; None on ranks for which others exchange.
        """
        self.places = [list(inside) for inside in places]
        self.wire = wire
        self._host = next(host for host, inside in enumerate(self.places) if index in inside)
        self._here = self.places[self._host].index(index)
        self._across = across
        self._across_ranks = tuple(across_ranks)
        self.worker = Worker(name)
        self.is_even = len({len(inside) for inside in self.places}) == 1
        """All hosts have as many ranks, so that each rank has counterparts."""

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        flat = tensor.view(-1)
        if not self.is_even or self.wire is None or op != "sum" or flat.nbytes <= SMALL_BYTES:
            self._all_reduce_by_leaders(flat, op)
            return
        mine = self.wire.reduce_slice(flat)
        if mine is not None:
            dist.all_reduce(mine, dist.ReduceOp.SUM, self._across)
            self.wire.gather_slices(flat)
            return
        size = self.wire.size
        padded = torch.zeros(-(-flat.numel() // size) * size, dtype=flat.dtype)
        padded[: flat.numel()].copy_(flat)
        parts = padded.view(size, -1)
        self.wire.reduce_scatter(parts[self._here], padded, add=False)
        dist.all_reduce(parts[self._here], dist.ReduceOp.SUM, self._across)
        self.wire.all_gather(list(parts), parts[self._here])
        flat.copy_(padded[: flat.numel()])

    def _all_reduce_by_leaders(self, flat: torch.Tensor, op: Reduction) -> None:
        if self.wire is not None:
            self.wire.all_reduce(flat, op)
        if self._here == 0:
            dist.all_reduce(flat, REDUCE_OPS[op], self._across)
        if self.wire is not None:
            self.wire.broadcast(flat, 0)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        host = next(number for number, inside in enumerate(self.places) if root in inside)
        place = self.places[host].index(root)
        sender = place if self.is_even else 0
        if self.wire is not None and self._host == host and sender != place:
            self.wire.broadcast(tensor, place)
        if self._here == sender:
            dist.broadcast(tensor, self._across_ranks[host], self._across)
        if self.wire is not None:
            self.wire.broadcast(tensor, sender)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Only where all hosts have as many ranks."""
        mine = [outputs[inside[self._here]].view(-1) for inside in self.places]
        messages = self._exchange(mine, [tensor] * len(mine))
        if mine[self._host].data_ptr() != tensor.data_ptr():
            mine[self._host].copy_(tensor.view(-1))
        messages.wait()
        if self.wire is None:
            return
        for part, inside in zip(mine, self.places, strict=True):
            self.wire.all_gather([outputs[place] for place in inside], part)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, add: bool) -> None:
        """Only where all hosts have as many ranks."""
        target, num_ranks = output.view(-1), sum(len(inside) for inside in self.places)
        parts = tensor.view(num_ranks, -1)
        sums = torch.empty(len(self.places), parts.shape[1], dtype=tensor.dtype)
        for total, inside in zip(sums, self.places, strict=True):
            together = inside == list(range(inside[0], inside[0] + len(inside)))
            block = parts[inside[0] : inside[0] + len(inside)] if together else parts[inside]
            if self.wire is None:
                total.copy_(block[0])
            else:
                self.wire.reduce_scatter(total, block.view(-1), add=False)
        received = torch.empty_like(sums)
        self._exchange(list(received), list(sums)).wait()
        received[self._host] = sums[self._host]
        add_into(target, list(received), add=add)

    def _exchange(self, places: Sequence[torch.Tensor], messages: Sequence[torch.Tensor]) -> WaitAll:
        """Message k to this rank's counterpart on host k, and into place k from it."""
        return exchange(places, messages, ranks=self._across_ranks, index=self._host, handle=self._across)
