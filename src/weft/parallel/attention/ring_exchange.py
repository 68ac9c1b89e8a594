"""Blocks that go round a ring of ranks: each rank computes with one block while the next is on its way.

    step 0            step 1            step 2           ...   after size - 1 hops every block has been everywhere
    rank 0: block 0   rank 0: block 3   rank 0: block 2
    rank 1: block 1   rank 1: block 0   rank 1: block 3
    rank 2: block 2   rank 2: block 1   rank 2: block 0
    rank 3: block 3   rank 3: block 2   rank 3: block 1

On the way back blocks go round once more, and behind each of them the sum of its gradients, which every rank adds to. A
block's gradient at home needs no journey, so the sum begins at the first rank the block visits and comes home with the
last hop: size - 1 hops for gradients too, one fewer than if it set out from home. It travels in float32 if blocks have
16 bits.

Ranks of one host that share memory let blocks lie where they are (`ring_shared_memory.py`); only sums of gradients
travel.

Work is written as steps that pause before they wait. A rank runs its own to the end; a ring that is all in one process,
for measuring and for tests, runs those of all places in turn.

Dims: B samples, G key heads, T tokens of one rank, D and E entries of a key and a value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from weft.comm.collectives import Pending
from weft.comm.group import Group
from weft.comm.p2p import exchange
from weft.comm.pairwise import WaitAll
from weft.parallel.attention.kernels import accumulator_dtype
from weft.parallel.attention.ring_shared_memory import CommonBlocks

BLOCKS, SUMS = 0, 1
"""Tags of the two kinds of messages, which are under way at the same time."""


class Arrival(Protocol):
    """A message on its way here."""

    def wait(self) -> Tensor: ...


class Rotation(Protocol):
    """A place in a ring, and the way to the next one."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def place(self, numel: int, like: Tensor) -> Tensor:
        """Memory for this place's block."""

    def gather(self, block: Tensor) -> tuple[Tensor, Pending] | None:
        """All blocks, a row each, and what to wait for before others' are read; None if blocks have to travel."""

    def pass_on(self, outgoing: Tensor, spare: Tensor, tag: int) -> Arrival:
        """Start sending to the next place what is no longer written here; what comes may be written into `spare`."""


class _WireArrival:
    __slots__ = ("_exchange", "_received")

    def __init__(self, exchange: WaitAll, received: Tensor) -> None:
        self._exchange = exchange
        self._received = received

    def wait(self) -> Tensor:
        self._exchange.wait()
        return self._received


@dataclass(frozen=True, slots=True)
class WireRotation:
    """The ranks of a group as a ring."""

    group: Group
    common: CommonBlocks | None = None
    """Where blocks are, if they need not travel."""

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        return self.group.index

    def place(self, numel: int, like: Tensor) -> Tensor:
        found = None if self.common is None else self.common.place(numel, like)
        return like.new_empty(numel) if found is None else found

    def gather(self, block: Tensor) -> tuple[Tensor, Pending] | None:
        return None if self.common is None else self.common.gather(block)

    def pass_on(self, outgoing: Tensor, spare: Tensor, tag: int) -> Arrival:
        to, source = (self.index + 1) % self.size, (self.index - 1) % self.size
        return _WireArrival(exchange(outgoing, spare, self.group, to=to, source=source, tag=tag), spare)


class _LocalArrival:
    __slots__ = ("_way",)

    def __init__(self, way: deque[Tensor]) -> None:
        self._way = way

    def wait(self) -> Tensor:
        return self._way.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRotation:
    """One place of a ring that is all in this process: nothing is sent or copied.

    It shows what blocks and merging cost without any wire. The steps of all places are finished together.
    """

    index: int
    ways: Sequence[tuple[deque[Tensor], deque[Tensor]]]
    """To each place, for each tag."""

    @property
    def size(self) -> int:
        return len(self.ways)

    def place(self, numel: int, like: Tensor) -> Tensor:
        return like.new_empty(numel)

    def gather(self, block: Tensor) -> None:
        del block

    def pass_on(self, outgoing: Tensor, spare: Tensor, tag: int) -> Arrival:
        self.ways[(self.index + 1) % self.size][tag].append(outgoing)
        return _LocalArrival(self.ways[self.index][tag])


def local_rotations(size: int) -> list[LocalRotation]:
    """All places of a ring in this process."""
    ways = [(deque[Tensor](), deque[Tensor]()) for _ in range(size)]
    return [LocalRotation(index=index, ways=ways) for index in range(size)]


Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work of one place that pauses wherever it will next wait for another."""


def finish(*places: Steps[Result]) -> list[Result]:
    """Run to the end: the steps of this rank, or those of all places of a local ring, in turn."""
    results: dict[int, Result] = {}
    while len(results) < len(places):
        for number, steps in enumerate(places):
            if number not in results:
                try:
                    next(steps)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(places))]


Part = tuple[Tensor, Tensor]
"""Gradients of the first keys and values of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Keys and values as one flat message."""

    k_shape: torch.Size
    v_shape: torch.Size

    def pack(self, k_BGTD: Tensor, v_BGTE: Tensor, rotation: Rotation) -> Tensor:
        """This rank's block."""
        flat = rotation.place(self.k_shape.numel() + self.v_shape.numel(), k_BGTD)
        k, v = self.unpack(flat)
        k.copy_(k_BGTD)
        v.copy_(v_BGTE)
        return flat

    def unpack(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Views of it."""
        split = self.k_shape.numel()
        return flat[:split].view(self.k_shape), flat[split:].view(self.v_shape)

    def total(self, parts: Sequence[Part], like: Tensor) -> Tensor:
        """A new sum of gradients."""
        flat = torch.empty_like(like, dtype=accumulator_dtype(like.dtype))
        if len(parts) == 1 and parts[0][0].shape[2] == self.k_shape[2]:
            for whole, part in zip(self.unpack(flat), parts[0], strict=True):
                whole.copy_(part)
        else:
            self.add(flat.zero_(), parts)
        return flat

    def add(self, flat: Tensor, parts: Sequence[Part]) -> None:
        for whole, *firsts in zip(self.unpack(flat), *parts, strict=True):
            for first in firsts:
                whole[:, :, : first.shape[2]] += first


def travel(block: Tensor, rotation: Rotation) -> Iterator[tuple[int, Tensor]]:
    """(whose it is, block) for every block of the ring, this rank's first; the next is on its way meanwhile.

    The memory of `block` is used for those that come.
    """
    found = rotation.gather(block)
    if found is not None:
        yield rotation.index, block
        blocks, arrival_of_all = found
        arrival_of_all.wait()
        for step in range(1, rotation.size):
            whose = (rotation.index - step) % rotation.size
            yield whose, blocks[whose]
        return
    spare = torch.empty_like(block) if rotation.size > 1 else block
    for step in range(rotation.size):
        is_last = step == rotation.size - 1
        arrival = None if is_last else rotation.pass_on(block, spare, BLOCKS)
        yield (rotation.index - step) % rotation.size, block
        if arrival is not None:
            block, spare = arrival.wait(), block


def travel_back(
    k_BGTD: Tensor, v_BGTE: Tensor, rotation: Rotation, find_parts: Callable[[int, Tensor, Tensor], Sequence[Part]]
) -> Steps[tuple[Tensor, Tensor]]:
    """(dk, dv) of this rank's own block, in its dtype, summed over all ranks while blocks go round once more.

    `find_parts(whose, k, v)` is what this rank has for a block.
    """
    pair = Pair(k_shape=k_BGTD.shape, v_shape=v_BGTE.shape)
    block = pair.pack(k_BGTD, v_BGTE, rotation)
    home, arrival, spare = block, None, None
    for step, (whose, visiting) in enumerate(travel(block, rotation)):
        parts = find_parts(whose, *pair.unpack(visiting))
        yield
        if step == 0:
            home = pair.total(parts, like=block)
            continue
        if arrival is None:
            total = pair.total(parts, like=block)
        else:
            total = arrival.wait()
            pair.add(total, parts)
        arrival = rotation.pass_on(total, torch.empty_like(home) if spare is None else spare, SUMS)
        spare = total
    yield
    if arrival is None:
        return pair.unpack(home.to(block.dtype))
    # Added and narrowed in one pass.
    return pair.unpack(torch.add(home, arrival.wait(), out=torch.empty_like(block)))
