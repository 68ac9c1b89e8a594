"""Blocks that rotate through a ring of ranks: each rank computes with one block while the next is on its way.

    step 0            step 1            step 2           ...   after size - 1 hops every rank has seen every block
    rank 0: block 0   rank 0: block 3   rank 0: block 2
    rank 1: block 1   rank 1: block 0   rank 1: block 3
    rank 2: block 2   rank 2: block 1   rank 2: block 0
    rank 3: block 3   rank 3: block 2   rank 3: block 1

In the backward pass blocks rotate once more, and behind each of them the sum of its gradients, in float32 if blocks
have 16 bits. The owner's own gradient need not travel, so the sum begins at the first rank that the block visits and
returns to its owner with the last hop: size - 1 hops for gradients too.

Ranks of one host read blocks from shared memory (`ring_shared_memory.py`); only sums of gradients travel.

Dims: B samples, G key heads, T tokens of one rank, D and E entries of a key and a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.group import Group
from weft.comm.p2p import exchange
from weft.dtypes import accumulator_dtype
from weft.parallel.attention.masks import Pass, window_mask
from weft.parallel.attention.ring_shared_memory import SharedBlocks
from weft.plan.partition.sequence import Band, Rectangle, rectangles
from weft.plan.partition.window import window_rectangles

BLOCKS, SUMS = 0, 1
"""Tags of the two kinds of messages, which are under way at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One call of attention on a ring of ranks: each sends to the next one and receives from the previous one."""

    group: Group
    shared: SharedBlocks | None = None
    """Memory that blocks can be read from where they need not travel."""
    now: Pass
    is_causal: bool
    scale: float
    band: Band | None = None
    """The window that queries look through; it says what is causal, too."""
    softcap: float | None = None
    """Scores s are softcap · tanh(s / softcap)."""

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        return self.group.index

    def rectangles(self, keys: int) -> tuple[Rectangle, ...]:
        """The work of this rank's queries with the keys of ring rank `keys`."""
        if self.band is not None:
            return window_rectangles(self.now.places, self.index, keys, self.band)
        return rectangles(self.now.places, self.index, keys, is_causal=self.is_causal)

    def mask(self, keys: int, one: Rectangle, device: torch.device) -> Tensor | None:
        mask, window = self.now.mask(self.index, keys, one), window_mask(one, device)
        return mask if window is None else window if mask is None else mask & window

    @property
    def may_see_nothing(self) -> bool:
        """True if a query may see no key of a block that it is compared with, or of all blocks."""
        return self.now.is_masked or (self.band is not None and self.band.after > 0)

    def pass_on(self, outgoing: Tensor, incoming: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start sending what is no longer written here. The function returned waits for what comes, in `incoming`."""
        to, source = (self.index + 1) % self.size, (self.index - 1) % self.size
        both = exchange([(outgoing, to)], [(incoming, source)], self.group, tag=tag)

        def wait() -> Tensor:
            both.wait()
            return incoming

        return wait


Part = tuple[int, Tensor, Tensor]
"""A key's number in a block, and the gradients of some keys and values from there on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Keys and values as one flat message."""

    k_shape: torch.Size
    v_shape: torch.Size

    def pack(self, k_BGTD: Tensor, v_BGTE: Tensor, ring: Ring) -> Tensor:
        numel = self.k_shape.numel() + self.v_shape.numel()
        flat = None if ring.shared is None else ring.shared.allocate(numel, k_BGTD)
        flat = k_BGTD.new_empty(numel) if flat is None else flat
        k, v = self.unpack(flat)
        k.copy_(k_BGTD)
        v.copy_(v_BGTE)
        return flat

    def unpack(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        split = self.k_shape.numel()
        return flat[:split].view(self.k_shape), flat[split:].view(self.v_shape)

    def total(self, parts: Sequence[Part], like: Tensor) -> Tensor:
        flat = torch.empty_like(like, dtype=accumulator_dtype(like.dtype))
        if len(parts) == 1 and parts[0][1].shape[2] == self.k_shape[2]:
            for whole, part in zip(self.unpack(flat), parts[0][1:], strict=True):
                whole.copy_(part)
        else:
            self.add(flat.zero_(), parts)
        return flat

    def add(self, flat: Tensor, parts: Sequence[Part]) -> None:
        k, v = self.unpack(flat)
        for first, of_k, of_v in parts:
            k[:, :, first : first + of_k.shape[2]] += of_k
            v[:, :, first : first + of_v.shape[2]] += of_v


def rotate(block: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """(owner, block) for every block of the ring, this rank's first; the next is on its way meanwhile.

    Blocks that arrive are written into the memory of `block`.
    """
    found = None if ring.shared is None else ring.shared.gather(block)
    if found is not None:
        yield ring.index, block
        blocks, all_written = found
        all_written.wait()
        for step in range(1, ring.size):
            owner = (ring.index - step) % ring.size
            yield owner, blocks[owner]
        return
    spare = torch.empty_like(block) if ring.size > 1 else block
    for step in range(ring.size):
        is_last = step == ring.size - 1
        wait = None if is_last else ring.pass_on(block, spare, BLOCKS)
        yield (ring.index - step) % ring.size, block
        if wait is not None:
            block, spare = wait(), block


def rotate_with_gradients(
    k_BGTD: Tensor, v_BGTE: Tensor, ring: Ring, find_parts: Callable[[int, Tensor, Tensor], Sequence[Part]]
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of this rank's own block, in its dtype, summed over all ranks while blocks rotate once more.

    `find_parts(owner, k, v)` computes this rank's gradients of a block.
    """
    pair = Pair(k_shape=k_BGTD.shape, v_shape=v_BGTE.shape)
    block = pair.pack(k_BGTD, v_BGTE, ring)
    own, wait, spare = block, None, None
    for step, (owner, visiting) in enumerate(rotate(block, ring)):
        parts = find_parts(owner, *pair.unpack(visiting))
        if step == 0:
            own = pair.total(parts, like=block)
            continue
        if wait is None:
            total = pair.total(parts, like=block)
        else:
            total = wait()
            pair.add(total, parts)
        wait = ring.pass_on(total, torch.empty_like(own) if spare is None else spare, SUMS)
        spare = total
    if wait is None:
        return pair.unpack(own.to(block.dtype))
    # Added and narrowed in one pass.
    return pair.unpack(torch.add(own, wait(), out=torch.empty_like(block)))
