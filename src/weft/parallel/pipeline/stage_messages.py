"""The messages between a rank's stages and their neighbours on other ranks.

Each direction between two stages has a group of its own (`message_group` in `plan/partition/groups.py`), which both
ranks use in the same order, because NCCL has no tags. A send never blocks. It may complete only when it is received,
which may be in a later step, so its tensor is kept until then.

Tensors between stages are the same on all tensor ranks. Where the network between stages is slower than that between
tensor ranks, each tensor rank sends a slice to its counterpart, and the receivers gather the slices from each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weft.comm.collectives import Pending, all_gather
from weft.comm.group import Group
from weft.comm.p2p import receive, send
from weft.comm.shared_memory.mailbox import Mailbox
from weft.mesh import Mesh
from weft.plan.partition.groups import message_group
from weft.plan.partition.wire import num_slices


class Arrival(Protocol):
    """A message being received."""

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlicedArrival:
    """A message of which this rank receives a slice.

    All tensor ranks of a stage wait for the same messages in the same order, that of their schedule, so their gathers
    match, also with the other exchanges of the group.
    """

    slice: torch.Tensor
    """A view of the whole."""
    whole: torch.Tensor
    pending: Pending
    tensor_ranks: Group

    def wait(self) -> None:
        self.pending.wait()
        all_gather(self.whole, self.slice, self.tensor_ranks)


class StageMessages:
    """Sends and receives between this rank's stages and their neighbours."""

    def __init__(self, mesh: Mesh, my_stages: Sequence[int], num_stages: int) -> None:
        self.rank, self.num_ranks = mesh.index("pipeline"), mesh.size("pipeline")
        self._process_groups = mesh.process_groups
        self._groups: dict[tuple[int, int], Group] = {}
        """The group of the messages from one stage to another."""
        for stage in my_stages:
            for peer in {stage - 1, stage + 1} & set(range(num_stages)):
                for direction in ((stage, peer), (peer, stage)):
                    self._groups[direction] = mesh.group(*message_group(*direction, self.num_ranks))
        self._tensor_ranks = mesh.group("tensor", "activations") if _are_slices_faster(mesh) else None
        """The ranks that send slices of the same tensors; None if each sends whole ones."""
        uses_streams = any(group.waits_on_stream for group in self._groups.values())
        self._host = _through_host(mesh) if uses_streams else None
        """The group of messages through host memory; None if none are needed."""
        self._sends: deque[tuple[Pending, torch.Tensor]] = deque()
        self._mailboxes: set[Mailbox] = set()
        """Mailboxes whose messages the receivers may not have taken yet."""

    def send(
        self, tensor: torch.Tensor, source: int, target: int, *, tag: int = 0, is_first_pass: bool = False
    ) -> None:
        """Send a tensor from a stage of this rank to a neighbour, which receives it with the same arguments.

        `is_first_pass`: passes of this shape have not run yet, so between GPUs the message goes through host memory.
        """
        group, message = self._groups[source, target], self._slice(tensor.contiguous())
        to = 1 - group.index
        if is_first_pass and self._host is not None:
            group, to = self._host, target % self.num_ranks
        pending = send(message, group, to=to, tag=tag)
        if (wire := group.wire(message)) is not None:
            self._mailboxes.add(wire.mailbox)
            return
        self._sends.append((pending, message))
        while self._sends and self._sends[0][0].is_over:
            self._sends.popleft()

    def receive(
        self, tensor: torch.Tensor, source: int, target: int, *, tag: int = 0, is_first_pass: bool = False
    ) -> Arrival:
        """Start to receive what a neighbour sends to a stage of this rank, into a contiguous tensor."""
        group, mine = self._groups[source, target], self._slice(tensor)
        from_ = 1 - group.index
        if is_first_pass and self._host is not None:
            group, from_ = self._host, source % self.num_ranks
        pending = receive(mine, group, source=from_, tag=tag)
        if mine is tensor:
            return pending
        assert self._tensor_ranks is not None
        return _SlicedArrival(slice=mine, whole=tensor.view(-1), pending=pending, tensor_ranks=self._tensor_ranks)

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that this rank sends or receives: its slice, or the whole."""
        ranks = self._tensor_ranks
        if ranks is None or num_slices(tensor.numel(), tensor.element_size(), ranks.size) == 1:
            return tensor
        each = tensor.numel() // ranks.size
        return tensor.view(-1)[ranks.index * each : (ranks.index + 1) * each]

    def send_to_previous_ranks(self, totals: torch.Tensor) -> None:
        """Send the last rank's totals from each rank to the one before, after the gradients that it has sent so far."""
        if self.rank < self.num_ranks - 1:
            self.receive(totals, self.rank + 1, self.rank).wait()
        if self.rank > 0:
            self.send(totals, self.rank, self.rank - 1)

    def settle(self) -> None:
        """Wait until all messages were received: those in transit would be lost with this object."""
        while self._sends:
            self._sends.popleft()[0].wait()
        while self._mailboxes:
            self._mailboxes.pop().settle()

    def fail(self) -> None:
        """Let no other mesh use these groups. Messages in flight are kept: their memory may yet be read or written."""
        self._process_groups.has_failed = True


def _through_host(mesh: Mesh) -> Group:
    """The pipeline's control group, for tensors on the device."""
    return replace(mesh.group("pipeline", "control"), device=mesh.world.device, through_host=True)


def _are_slices_faster(mesh: Mesh) -> bool:
    """True if tensor ranks send slices; the same on every rank.

    Through the memory of one host a message is one copy, and to gather it would be another.
    """
    if mesh.size("tensor") == 1 or mesh.group("tensor", "activations").is_stream_ordered:
        return mesh.size("tensor") > 1

    def crosses_hosts(axis: str) -> bool:
        return any(len({mesh.world.hosts[rank] for rank in ranks}) > 1 for ranks in mesh.grid.groups(axis))

    return crosses_hosts("pipeline") and not crosses_hosts("tensor")
