"""The messages between a rank's stages and their neighbours on other ranks.

Each way between two stages has a group of its own (`message_group` in `plan/partition/groups.py`), which both ends use
in the same order: NCCL knows no tags. A send never blocks. It may end only when it is received, which may be in a
later step, so its tensor is kept until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from weft.comm.collectives import Pending
from weft.comm.group import Group
from weft.comm.p2p import receive, send
from weft.comm.shared_memory.mailbox import Mailbox
from weft.mesh import Mesh
from weft.plan.partition.groups import message_group


class Links:
    """This rank's ends of the ways between stages."""

    def __init__(self, mesh: Mesh, my_stages: Sequence[int], num_stages: int) -> None:
        self.rank, self.num_ranks = mesh.index("pipeline"), mesh.size("pipeline")
        self._process_groups = mesh.process_groups
        self._groups: dict[tuple[int, int], Group] = {}
        """The group of the messages from one stage to another."""
        for stage in my_stages:
            for peer in {stage - 1, stage + 1} & set(range(num_stages)):
                for way in ((stage, peer), (peer, stage)):
                    self._groups[way] = mesh.group(*message_group(*way, self.num_ranks))
        self._sends: deque[tuple[Pending, torch.Tensor]] = deque()
        self._mailboxes: set[Mailbox] = set()
        """Mailboxes whose messages the receivers may not have taken yet."""

    def post(self, tensor: torch.Tensor, source: int, target: int, *, tag: int = 0) -> None:
        """Send a tensor from a stage of this rank to a neighbour, which receives it with the same tag."""
        group, message = self._groups[source, target], tensor.contiguous()
        pending = send(message, group, to=1 - group.index, tag=tag)
        if (wire := group.wire(message)) is not None:
            self._mailboxes.add(wire.mailbox)
            return
        self._sends.append((pending, message))
        while self._sends and self._sends[0][0].is_over:
            self._sends.popleft()

    def receive(self, tensor: torch.Tensor, source: int, target: int, *, tag: int = 0) -> Pending:
        """Start receiving what a neighbour sends to a stage of this rank."""
        group = self._groups[source, target]
        return receive(tensor, group, source=1 - group.index, tag=tag)

    def pass_back(self, words: torch.Tensor) -> None:
        """Hand the last rank's words from rank to rank, behind the gradients that each rank has sent so far."""
        if self.rank < self.num_ranks - 1:
            self.receive(words, self.rank + 1, self.rank).wait()
        if self.rank > 0:
            self.post(words, self.rank, self.rank - 1)

    def settle(self) -> None:
        """Wait until all messages were received: those in transit would be lost with this object."""
        while self._sends:
            self._sends.popleft()[0].wait()
        while self._mailboxes:
            self._mailboxes.pop().settle()

    def fail(self) -> None:
        """Let no other mesh use these groups. What is under way stays: it may be written, or others may wait for it."""
        self._process_groups.has_failed = True
