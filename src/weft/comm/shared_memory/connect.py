"""Shared memory for the ranks of a group; collective, and all ranks fail alike.

The first rank creates a segment and tells the others where it is through their process group. Once all have opened it,
nobody else can, so nothing is left behind, whoever is killed when.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.shared_memory.barrier import Barrier, control_bytes
from weft.comm.shared_memory.counters import Peer
from weft.comm.shared_memory.mailbox import Mailbox, mailbox_bytes
from weft.comm.shared_memory.native import find_kernels
from weft.comm.shared_memory.reduction import REDUCE_OPS, Reduction
from weft.comm.shared_memory.segments import Segment, SegmentHandle, SegmentOwner, Way, open_segment
from weft.comm.shared_memory.transport import SharedTransport

WAYS: tuple[Way, ...] = ("anonymous", "named")
_MESSAGE_BYTES = 1024
_REASON_LETTERS = 100
_DEFAULT_TIMEOUT_S = 1800.0


class SharedMemoryError(Exception):
    """The ranks of a group cannot share memory; raised on all of them."""


@dataclass(slots=True)
class Connection:
    """The process group by which ranks get shared memory, and this rank's place in it."""

    _handle: dist.ProcessGroup
    _ranks: tuple[int, ...]
    _index: int
    ways: tuple[Way, ...] = WAYS
    _wire: SharedTransport | None = None

    @property
    def is_first(self) -> bool:
        return self._index == 0

    def share(self, num_bytes: int) -> tuple[Segment, Way]:
        """Zeroed memory that all ranks of the group see. SharedMemoryError on all of them if one cannot."""
        reasons = []
        for way in self.ways:
            owner, problem = None, ""
            if self.is_first:
                try:
                    owner = SegmentOwner(num_bytes, way)
                except OSError as error:
                    problem = str(error)[:_REASON_LETTERS]
            said = self._tell({"problem": problem, "handle": asdict(owner.handle) if owner else None})
            segment = owner.segment if owner else None
            if segment is None and not said["problem"]:
                try:
                    segment = open_segment(SegmentHandle(**said["handle"]))
                except OSError as error:
                    problem = str(error)
            is_opened = torch.tensor([int(segment is not None)])
            self._reduce(is_opened, "min")
            if owner is not None:
                owner.close()
            if segment is not None and is_opened:
                return segment, way
            reasons.append(said["problem"] or problem or "a rank cannot open what another one made")
        raise SharedMemoryError("; ".join(reasons))

    def connect(self, *, spin: bool, name: str) -> SharedTransport:
        """Let the group exchange through shared memory."""
        find_kernels()  # built now if ever, and not while others wait in an exchange
        size = len(self._ranks)
        first, rest = control_bytes(size), mailbox_bytes(size)
        segment, way = self.share(first + rest)
        said = torch.zeros(size + 1, dtype=torch.int64)
        said[self._index], said[size] = os.getpid(), spin
        self._reduce(said, "sum")
        *pids, num_spinning = said.tolist()
        peers = [Peer(rank, pid) for rank, pid in zip(self._ranks, pids, strict=True)]
        settings: dict[str, Any] = {
            "index": self._index,
            "peers": peers,
            "timeout_s": timeout_s(self._handle),
            "spin": num_spinning == size,  # alike on all ranks: it decides how much goes into a slot
        }
        mailbox = Mailbox(segment.part(first, rest), way=way, **settings)
        barrier = Barrier(segment.part(0, first), **settings)
        dist.barrier(self._handle)  # a rank that had ended before its peers looked its process up would not be missed
        self._wire = SharedTransport(barrier, mailbox, name=name)
        return self._wire

    def _reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        wire = self._wire
        if wire is None:
            dist.all_reduce(tensor, REDUCE_OPS[op], self._handle)
        else:
            wire.worker.run(lambda: wire.all_reduce(tensor, op))

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """The first rank's message, on all ranks."""
        memory = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        if self.is_first:
            text = json.dumps(message).encode()
            memory[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        wire = self._wire
        if wire is None:
            dist.broadcast(memory, self._ranks[0], self._handle)
        else:
            wire.worker.run(lambda: wire.broadcast(memory, 0))
        told: dict[str, Any] = json.loads(bytes(memory.tolist()).rstrip(b"\0"))
        return told


def timeout_s(handle: dist.ProcessGroup) -> float:
    """Seconds after which the group's own exchanges give up."""
    for kind in ("cpu", "cuda"):  # a world of the user's own may have NCCL only
        with suppress(AttributeError, RuntimeError):
            timeout: timedelta = handle._get_backend(torch.device(kind)).options._timeout
            return timeout.total_seconds()
    return _DEFAULT_TIMEOUT_S
