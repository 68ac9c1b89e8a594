"""Messages between two ranks of one host, through its memory.

Each ordered pair of ranks has a ring of envelopes. A sender copies its message into memory of its own that the receiver
can open, puts an envelope into the ring and returns: it waits for nobody, whatever the order of calls. The receiver
copies the message out when it waits for it, and marks the envelope: then the sender may use that memory again.
Messages of one tag arrive in the order in which they were sent.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter as Counts
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from weft.comm.shared_memory.counters import LINE_BYTES, LOOK_EVERY_S, Counter, Peer, Waiting
from weft.comm.shared_memory.segments import SegmentHandle, SegmentOwner, Way, forget_name, open_segment

NUM_ENVELOPES = 256
"""Messages from one rank to another that were not received yet; one more waits for the first to be."""
_WORDS = 16
"""Words per envelope: tag, bytes, block and its bytes, fd, name and token of its segment, and the receiver's word."""
_OPENED = 7
"""The place of the receiver's word, which is one more than the number of the message it has copied out."""
_RING_BYTES = LINE_BYTES + NUM_ENVELOPES * _WORDS * 8
_SMALLEST_BLOCK_BYTES = 2**16
_MOST_VIEWS = 64
_NAP_S = 1e-4


def mailbox_bytes(num_ranks: int) -> int:
    return num_ranks * num_ranks * _RING_BYTES


@dataclass(slots=True, kw_only=True)
class _Block:
    """Memory for one message at a time from one rank to another, as one of them sees it."""

    memory: torch.Tensor
    views: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = field(default_factory=dict)
    owner: SegmentOwner | None = None
    """The sender's."""
    message: int = -1
    """The sender's: the message it holds; -1 once that was received."""

    def view_like(self, message: torch.Tensor) -> torch.Tensor:
        """The memory as a message of this form. Messages repeat, and making a view takes as long as a small copy."""
        form = (message.dtype, message.shape)
        if form not in self.views:
            if len(self.views) >= _MOST_VIEWS:
                self.views.clear()
            self.views[form] = self.memory[: message.nbytes].view(message.dtype).view(message.shape)
        return self.views[form]


@dataclass(slots=True)
class _Outgoing:
    """The messages from this rank to one other."""

    _words: memoryview
    """The envelopes."""
    _counter: Counter
    _receiver: Peer
    _way: Way
    _timeout_s: float
    _blocks: list[_Block] = field(default_factory=list)
    _num_sent: int = 0

    def send(self, message: torch.Tensor, tag: int) -> None:
        number, num_bytes = self._num_sent, message.nbytes
        if number >= NUM_ENVELOPES:
            self._wait_until_opened(number - NUM_ENVELOPES, self._timeout_s)
        place = self._find_block(num_bytes)
        block = self._blocks[place]
        block.view_like(message).copy_(message)
        block.message = number
        assert block.owner is not None
        handle, first = block.owner.handle, number % NUM_ENVELOPES * _WORDS
        envelope = (tag, num_bytes, place, handle.num_bytes, handle.fd, handle.name_number, handle.token)
        self._words[first : first + _OPENED] = array("q", envelope)
        self._num_sent += 1
        self._counter.post()

    def settle(self, timeout_s: float) -> None:
        """Wait until every message has been received: the memory it lies in goes with this rank."""
        for block in self._blocks:
            if block.message >= 0 and not self._is_opened(block.message):
                self._wait_until_opened(block.message, timeout_s)

    def _wait_until_opened(self, number: int, timeout_s: float) -> None:
        started = looked = time.monotonic()
        while not self._is_opened(number):
            time.sleep(_NAP_S)
            now = time.monotonic()
            if now - looked > LOOK_EVERY_S:
                looked, rank = now, self._receiver.rank
                if self._receiver.is_gone:
                    raise RuntimeError(f"Connection closed by peer: rank {rank} is gone")
                if now - started > timeout_s:
                    raise RuntimeError(f"Timed out: rank {rank} has not received what was sent to it")

    def _is_opened(self, number: int) -> bool:
        return self._words[number % NUM_ENVELOPES * _WORDS + _OPENED] > number

    def _find_block(self, num_bytes: int) -> int:
        """The number of the smallest free block that fits and is not far too large; else of a new one."""
        best: int | None = None
        for place, block in enumerate(self._blocks):
            if block.message >= 0 and self._is_opened(block.message):
                block.message = -1
                assert block.owner is not None
                block.owner.close()  # whoever copied a message out of it has opened it
            size = block.memory.numel()
            if block.message < 0 and num_bytes <= size <= max(4 * num_bytes, _SMALLEST_BLOCK_BYTES):
                if best is None or size < self._blocks[best].memory.numel():
                    best = place
        if best is not None:
            return best
        size = max(_SMALLEST_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length() if num_bytes else 0)
        try:
            owner = SegmentOwner(size, self._way)
        except OSError as error:
            raise RuntimeError(f"no shared memory for a message of {num_bytes} bytes: {error}") from error
        memory = torch.frombuffer(owner.segment.part(0, size), dtype=torch.uint8)
        self._blocks.append(_Block(memory=memory, owner=owner))
        return len(self._blocks) - 1


@dataclass(slots=True)
class _Incoming:
    """The messages from one other rank to this one."""

    _words: memoryview
    _counter: Counter
    _sender: Peer
    _way: Way
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _num_seen: int = 0
    _num_awaited: Counts[int] = field(default_factory=Counts)
    _num_arrived: Counts[int] = field(default_factory=Counts)
    _arrived: dict[tuple[int, int], int] = field(default_factory=dict)
    """(tag, how many of this tag were before) -> number of the message"""

    def expect(self, target: torch.Tensor, tag: int) -> Waiting:
        """The next message of this tag; the wait copies it out."""
        self._num_awaited[tag] += 1
        return Waiting(partial(self._receive, target, tag, self._num_awaited[tag] - 1))

    def _receive(self, target: torch.Tensor, tag: int, place: int) -> None:
        while (tag, place) not in self._arrived:
            self._counter.wait((self._num_seen + 1) % 2**32)
            seen = self._words[self._num_seen % NUM_ENVELOPES * _WORDS]
            self._arrived[seen, self._num_arrived[seen]] = self._num_seen
            self._num_arrived[seen] += 1
            self._num_seen += 1
        number = self._arrived.pop((tag, place))
        first = number % NUM_ENVELOPES * _WORDS
        _, num_bytes, *where = self._words[first : first + _OPENED].tolist()
        block = self._find_block(*where)
        if num_bytes != target.nbytes:
            self._words[first + _OPENED] = number + 1
            raise RuntimeError(
                f"rank {self._sender.rank} sent {num_bytes} bytes with tag {tag}, {target.nbytes} were awaited"
            )
        target.copy_(block.view_like(target))
        self._counter.order_writes()  # the copy is complete before the sender sees the mark
        self._words[first + _OPENED] = number + 1

    def _find_block(self, place: int, size: int, fd: int, name_number: int, token: int) -> _Block:
        if place not in self._blocks:
            handle = SegmentHandle(
                way=self._way, num_bytes=size, token=token, pid=self._sender.pid, fd=fd, name_number=name_number
            )
            try:
                segment = open_segment(handle)
                forget_name(handle)
            except OSError as error:
                raise RuntimeError(
                    f"Connection closed by peer: a message of rank {self._sender.rank} cannot be opened ({error})"
                ) from error
            self._blocks[place] = _Block(memory=torch.frombuffer(segment.part(0, size), dtype=torch.uint8))
        return self._blocks[place]


class Mailbox:
    """All rings that begin or end at this rank."""

    def __init__(
        self, memory: memoryview, *, index: int, peers: Sequence[Peer], timeout_s: float, spin: bool, way: Way
    ) -> None:
        """`memory`: mailbox_bytes, zeroed, the same for all ranks."""
        size = len(peers)
        self._timeout_s = timeout_s

        def ring(source: int, target: int) -> tuple[memoryview, Counter]:
            first = (source * size + target) * _RING_BYTES
            part = memory[first : first + _RING_BYTES]
            counter = Counter(part[:LINE_BYTES], owner=peers[source], timeout_s=timeout_s, spin=spin)
            return part[LINE_BYTES:].cast("q"), counter

        others = [rank for rank in range(size) if rank != index]
        self._outgoing = {rank: _Outgoing(*ring(index, rank), peers[rank], way, timeout_s) for rank in others}
        self._incoming = {rank: _Incoming(*ring(rank, index), peers[rank], way) for rank in others}

    def send(self, tensor: torch.Tensor, *, to: int, tag: int) -> None:
        """The tensor may change as soon as this returns."""
        self._outgoing[to].send(tensor.detach(), tag)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until every message that was sent has been received."""
        for outgoing in self._outgoing.values():
            outgoing.settle(self._timeout_s if timeout_s is None else timeout_s)

    def receive(self, tensor: torch.Tensor, *, source: int, tag: int) -> Waiting:
        """The next message of this tag that is not awaited yet."""
        return self._incoming[source].expect(tensor.detach(), tag)
