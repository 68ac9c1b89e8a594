"""Messages between two ranks of one host, through its memory.

For each ordered pair of ranks there is a ring of envelopes. A sender copies its message into memory of its own that the
receiver can open, puts an envelope into the ring and is done: it waits for nobody, whatever the order of calls. The
receiver copies the message out when it waits for it, and marks the envelope: then the memory is the sender's again.
Messages of one tag arrive in the order in which they were sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft.comm.shared_memory.counters import LINE_BYTES, Counter, Peer
from weft.comm.shared_memory.segments import SegmentOwner, Segment, SegmentHandle, Way, forget_name, open_segment

NUM_ENVELOPES = 256
"""Messages from one rank to another that nobody has received yet; one more waits for the first to be."""
_WORDS = 16
_RING_BYTES = LINE_BYTES + NUM_ENVELOPES * _WORDS * 8
_SMALLEST_BLOCK_BYTES = 2**16
_MOST_VIEWS = 64
_NAP_S = 1e-4
_LOOK_EVERY_S = 0.2

# Words of an envelope.
_TAG, _NUM_BYTES, _BLOCK, _BLOCK_BYTES, _FD, _NAME, _TOKEN, _OPENED = range(8)
"""The last is the receiver's: one more than the number of the message it has copied out."""


_Views = dict[tuple[torch.dtype, torch.Size], torch.Tensor]
"""Of some memory, as messages of each form that it held."""


def mailbox_bytes(num_ranks: int) -> int:
    return num_ranks * num_ranks * _RING_BYTES


@dataclass(slots=True, kw_only=True)
class _Block:
    """Memory of a sender for one message at a time to one receiver."""

    number: int
    owner: SegmentOwner
    memory: torch.Tensor
    message: int = -1
    """The last message it held."""
    views: _Views = field(default_factory=dict)


def _view(memory: torch.Tensor, views: _Views, form: tuple[torch.dtype, torch.Size], num_bytes: int) -> torch.Tensor:
    """A message of this form in some memory. Messages repeat, and making a view takes as long as a small copy."""
    if form not in views:
        if len(views) >= _MOST_VIEWS:
            views.clear()
        views[form] = memory[:num_bytes].view(form[0]).view(form[1])
    return views[form]


class _Outgoing:
    """From this rank to one other."""

    def __init__(self, ring: memoryview, counter: Counter, receiver: Peer, way: Way, timeout_s: float) -> None:
        self._words = ring[LINE_BYTES:].cast("q")
        self._counter = counter
        self._receiver = receiver
        self._timeout_s = timeout_s
        self._way: Way = way
        self._blocks: list[_Block] = []
        self._num_sent = 0

    def send(self, message: torch.Tensor, tag: int) -> None:
        number, num_bytes = self._num_sent, message.nbytes
        if number >= NUM_ENVELOPES:
            self._wait_until_opened(number - NUM_ENVELOPES, self._timeout_s)
        block = self._find_block(num_bytes)
        _view(block.memory, block.views, (message.dtype, message.shape), num_bytes).copy_(message)
        block.message = number
        handle = block.owner.handle
        first = number % NUM_ENVELOPES * _WORDS
        words = self._words
        words[first + _TAG], words[first + _NUM_BYTES] = tag, num_bytes
        words[first + _BLOCK], words[first + _BLOCK_BYTES] = block.number, block.memory.numel()
        words[first + _FD], words[first + _NAME], words[first + _TOKEN] = handle.fd, handle.name_number, handle.token
        self._num_sent += 1
        self._counter.post()

    def settle(self, timeout_s: float) -> None:
        """Wait until every message has been taken: the memory it lies in goes with this rank."""
        for block in self._blocks:
            if block.message >= 0 and not self._is_opened(block.message):
                self._wait_until_opened(block.message, timeout_s)

    def _wait_until_opened(self, number: int, timeout_s: float) -> None:
        started = looked = time.monotonic()
        while not self._is_opened(number):
            time.sleep(_NAP_S)
            now = time.monotonic()
            if now - looked > _LOOK_EVERY_S:
                looked, rank = now, self._receiver.rank
                if self._receiver.is_gone:
                    raise RuntimeError(f"Connection closed by peer: rank {rank} is gone")
                if now - started > timeout_s:
                    raise RuntimeError(f"Timed out: rank {rank} has not received what was sent to it")

    def _is_opened(self, number: int) -> bool:
        return self._words[number % NUM_ENVELOPES * _WORDS + _OPENED] > number

    def _find_block(self, num_bytes: int) -> _Block:
        """The smallest free block that fits and is not far too large; else a new one."""
        best: _Block | None = None
        for block in self._blocks:
            if block.message >= 0 and self._is_opened(block.message):
                block.message = -1
                block.owner.close()  # whoever copied a message out of it has opened it
            if block.message < 0 and num_bytes <= block.memory.numel() <= max(4 * num_bytes, _SMALLEST_BLOCK_BYTES):
                if best is None or block.memory.numel() < best.memory.numel():
                    best = block
        if best is None:
            size = max(_SMALLEST_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length() if num_bytes else 0)
            try:
                owner = SegmentOwner(size, self._way)
            except OSError as error:
                raise RuntimeError(f"no shared memory for a message of {num_bytes} bytes: {error}") from error
            memory = torch.frombuffer(owner.segment.part(0, size), dtype=torch.uint8)
            best = _Block(number=len(self._blocks), owner=owner, memory=memory)
            self._blocks.append(best)
        return best


class _Incoming:
    """From one other rank to this one."""

    def __init__(self, ring: memoryview, counter: Counter, sender: Peer, way: Way) -> None:
        self._words = ring[LINE_BYTES:].cast("q")
        self._counter = counter
        self._sender = sender
        self._way: Way = way
        self._segments: dict[int, tuple[Segment, torch.Tensor, _Views]] = {}
        self._num_seen = 0
        self._num_awaited: dict[int, int] = {}
        self._num_arrived: dict[int, int] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        """(tag, how many of this tag were before) -> number of the message"""

    def expect(self, tag: int) -> int:
        """The place of the next message of this tag among all of this tag."""
        place = self._num_awaited.get(tag, 0)
        self._num_awaited[tag] = place + 1
        return place

    def take(self, target: torch.Tensor, tag: int, place: int) -> None:
        """Copy a message out, once it is there."""
        while (tag, place) not in self._arrived:
            self._counter.wait((self._num_seen + 1) % 2**32)
            seen = self._words[self._num_seen % NUM_ENVELOPES * _WORDS + _TAG]
            order = self._num_arrived.get(seen, 0)
            self._num_arrived[seen] = order + 1
            self._arrived[seen, order] = self._num_seen
            self._num_seen += 1
        number = self._arrived.pop((tag, place))
        first = number % NUM_ENVELOPES * _WORDS
        num_bytes = self._words[first + _NUM_BYTES]
        memory, views = self._memory(first)
        if num_bytes != target.nbytes:
            self._words[first + _OPENED] = number + 1
            raise RuntimeError(
                f"rank {self._sender.rank} sent {num_bytes} bytes with tag {tag}, {target.nbytes} were awaited"
            )
        target.copy_(_view(memory, views, (target.dtype, target.shape), num_bytes))
        self._counter.order_writes()  # the copy is over before the sender hears of it
        self._words[first + _OPENED] = number + 1

    def _memory(self, first: int) -> tuple[torch.Tensor, _Views]:
        words = self._words
        block = words[first + _BLOCK]
        if block not in self._segments:
            size, token = words[first + _BLOCK_BYTES], words[first + _TOKEN]
            handle = SegmentHandle(
                way=self._way,
                num_bytes=size,
                token=token,
                pid=self._sender.pid,
                fd=words[first + _FD],
                name_number=words[first + _NAME],
            )
            try:
                segment = open_segment(handle)
                forget_name(handle)
            except OSError as error:
                raise RuntimeError(
                    f"Connection closed by peer: a message of rank {self._sender.rank} cannot be opened ({error})"
                ) from error
            self._segments[block] = (segment, torch.frombuffer(segment.part(0, size), dtype=torch.uint8), {})
        return self._segments[block][1:]


class Receipt:
    """A message that is awaited: `wait` copies it out."""

    __slots__ = ("_incoming", "_place", "_tag", "_target")

    def __init__(self, incoming: _Incoming, target: torch.Tensor, tag: int) -> None:
        self._incoming = incoming
        self._target = target
        self._tag = tag
        self._place = incoming.expect(tag)

    def wait(self) -> None:
        self._incoming.take(self._target, self._tag, self._place)


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
            return part, Counter(part[:LINE_BYTES], owner=peers[source], timeout_s=timeout_s, spin=spin)

        others = [rank for rank in range(size) if rank != index]
        self._outgoing = {rank: _Outgoing(*ring(index, rank), peers[rank], way, timeout_s) for rank in others}
        self._incoming = {rank: _Incoming(*ring(rank, index), peers[rank], way) for rank in others}

    def send(self, tensor: torch.Tensor, *, to: int, tag: int) -> None:
        """The tensor may change as soon as this returns."""
        self._outgoing[to].send(tensor.detach(), tag)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until every message that was sent has been taken."""
        for outgoing in self._outgoing.values():
            outgoing.settle(self._timeout_s if timeout_s is None else timeout_s)

    def receive(self, tensor: torch.Tensor, *, source: int, tag: int) -> Receipt:
        """The next message of this tag that nobody awaits yet."""
        return Receipt(self._incoming[source], tensor.detach(), tag)
