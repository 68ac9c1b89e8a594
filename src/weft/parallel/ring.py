"""Ring attention: queries stay, blocks of keys and values go round, and what each block gives is merged as it comes.

    step 0          step 1          ...   every rank computes with one block while the next is on its way;
    q0 k0 ── k0 ─>  q0 k3 ── k3 ─>        after ring - 1 hops every block has been everywhere
    q1 k1 ── k1 ─>  q1 k0 ── k0 ─>
    q2 k2 ── k2 ─>  q2 k1 ── k1 ─>
    q3 k3 ── k3 ─>  q3 k2 ── k2 ─>  (and to q0)

Backward the blocks go round once more, and behind each of them the sum of its gradients, which each rank adds to. A
block's gradient at home needs no journey, so the sum begins at the first rank it visits and comes home with the last
hop: ring - 1 hops for gradients too, one fewer than if it set out from home.

Sums and merged outputs are float32 where inputs have 16 bits, and so are the gradients that travel. Keys and values
travel as one flat message. A block of which a rank may see nothing is passed on and costs no computation.

Dims as in `attention_kernels.py`; T is the number of tokens of one ring rank.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.group import Group
from weft.comm.p2p import Together, exchange
from weft.parallel.attention_kernels import (
    Gradients,
    accumulator_dtype,
    attend_block,
    attend_block_backward,
)
from weft.parallel.attention_masks import Masks
from weft.plan.sequence import Places, rectangles

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

    def pass_on(self, outgoing: Tensor, spare: Tensor, tag: int) -> Arrival:
        """Start sending to the next place what is no longer written here; what comes may be written into `spare`."""


class _WireArrival:
    __slots__ = ("_exchange", "_received")

    def __init__(self, exchange: Together, received: Tensor) -> None:
        self._exchange = exchange
        self._received = received

    def wait(self) -> Tensor:
        self._exchange.wait()
        return self._received


@dataclass(frozen=True, slots=True)
class WireRotation:
    """The ranks of a group as a ring."""

    group: Group

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        return self.group.index

    def pass_on(self, outgoing: Tensor, spare: Tensor, tag: int) -> Arrival:
        to, source = (self.index + 1) % self.size, (self.index - 1) % self.size
        return _WireArrival(exchange(outgoing, spare, self.group, to=to, source=source, tag=tag), spare)


class _LocalArrival:
    __slots__ = ("_timeout_s", "_way")

    def __init__(self, way: queue.SimpleQueue[Tensor], timeout_s: float) -> None:
        self._way = way
        self._timeout_s = timeout_s

    def wait(self) -> Tensor:
        return self._way.get(timeout=self._timeout_s)


class LocalRotation:
    """One of several places of a ring inside one process, each run by a thread of its own: nothing is copied.

    It shows what blocks and merging cost without any wire.
    """

    def __init__(self, index: int, ways: Sequence[Sequence[queue.SimpleQueue[Tensor]]], timeout_s: float) -> None:
        self.index = index
        self.size = len(ways)
        self._ways = ways
        self._timeout_s = timeout_s

    def pass_on(self, outgoing: Tensor, spare: Tensor, tag: int) -> Arrival:
        self._ways[(self.index + 1) % self.size][tag].put(outgoing)
        return _LocalArrival(self._ways[self.index][tag], self._timeout_s)


def local_rotations(size: int, *, timeout_s: float = 60.0) -> list[LocalRotation]:
    """All places of a ring in this process; run each in its own thread."""
    ways: list[list[queue.SimpleQueue[Tensor]]] = [[queue.SimpleQueue(), queue.SimpleQueue()] for _ in range(size)]
    return [LocalRotation(index, ways, timeout_s) for index in range(size)]


Part = tuple[Tensor, Tensor]
"""Gradients of the first keys and values of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Keys and values as one flat message."""

    k_shape: torch.Size
    v_shape: torch.Size

    def pack(self, k_BGTD: Tensor, v_BGTE: Tensor) -> Tensor:
        flat = k_BGTD.new_empty(self.k_shape.numel() + self.v_shape.numel())
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
    spare = torch.empty_like(block) if rotation.size > 1 else block
    for step in range(rotation.size):
        is_last = step == rotation.size - 1
        arrival = None if is_last else rotation.pass_on(block, spare, BLOCKS)
        yield (rotation.index - step) % rotation.size, block
        if arrival is not None:
            block, spare = arrival.wait(), block


def travel_back(
    k_BGTD: Tensor, v_BGTE: Tensor, rotation: Rotation, find_parts: Callable[[int, Tensor, Tensor], Sequence[Part]]
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of this rank's own block, summed over all ranks while blocks go round once more.

    `find_parts(whose, k, v)` is what this rank has for a block.
    """
    pair = Pair(k_shape=k_BGTD.shape, v_shape=v_BGTE.shape)
    block = pair.pack(k_BGTD, v_BGTE)
    home, arrival, spare = block, None, None
    for step, (whose, visiting) in enumerate(travel(block, rotation)):
        parts = find_parts(whose, *pair.unpack(visiting))
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
    if arrival is not None:
        home += arrival.wait()
    return pair.unpack(home)


def ring_forward(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    *,
    rotation: Rotation,
    places: Places,
    is_causal: bool,
    scale: float,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """(out_BHTE in the dtype of the inputs, lse_BHT)."""
    merged = _Merged(is_masked=masks is not None)
    for keys, k, v in _blocks(k_BGTD, v_BGTE, rotation):
        for one in rectangles(places, rotation.index, keys, is_causal=is_causal):
            out, lse = attend_block(
                q_BHTD[:, :, slice(*one.q)],
                k[:, :, slice(*one.k)],
                v[:, :, slice(*one.k)],
                is_causal=one.is_causal,
                scale=scale,
                mask=None if masks is None else masks.block(rotation.index, keys, one),
            )
            merged.add(out, lse, one.q)
    return merged.out.to(q_BHTD.dtype), merged.lse


def ring_backward(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    out_BHTE: Tensor,
    lse_BHT: Tensor,
    *,
    rotation: Rotation,
    places: Places,
    is_causal: bool,
    scale: float,
    masks: Masks | None = None,
) -> Gradients:
    """(dq, dk, dv), in the dtype of the inputs."""
    dq: Tensor | None = None

    def find_parts(keys: int, k: Tensor, v: Tensor) -> list[Part]:
        nonlocal dq
        parts = []
        for one in rectangles(places, rotation.index, keys, is_causal=is_causal):
            of_queries, of_keys = slice(*one.q), slice(*one.k)
            block_dq, *part = attend_block_backward(
                grad_BHTE[:, :, of_queries],
                q_BHTD[:, :, of_queries],
                k[:, :, of_keys],
                v[:, :, of_keys],
                out_BHTE[:, :, of_queries],
                lse_BHT[:, :, of_queries],
                is_causal=one.is_causal,
                scale=scale,
                mask=None if masks is None else masks.block(rotation.index, keys, one),
            )
            if dq is None:  # the first block that is seen is seen by every query
                dq = block_dq
            else:
                dq = dq.to(accumulator_dtype(dq.dtype))
                dq[:, :, of_queries] += block_dq
            parts.append((part[0], part[1]))
        return parts

    if rotation.size == 1:
        ((dk, dv),) = find_parts(0, k_BGTD, v_BGTE)
        padding = k_BGTD.shape[2] - dk.shape[2]  # which has no gradient
        dk, dv = (F.pad(one, (0, 0, 0, padding)) if padding else one for one in (dk, dv))
    else:
        dk, dv = travel_back(k_BGTD, v_BGTE, rotation, find_parts)
    assert dq is not None
    return dq.to(q_BHTD.dtype), dk.to(k_BGTD.dtype), dv.to(v_BGTE.dtype)


def _blocks(k_BGTD: Tensor, v_BGTE: Tensor, rotation: Rotation) -> Iterator[tuple[int, Tensor, Tensor]]:
    if rotation.size == 1:
        yield 0, k_BGTD, v_BGTE
        return
    pair = Pair(k_shape=k_BGTD.shape, v_shape=v_BGTE.shape)
    for whose, block in travel(pair.pack(k_BGTD, v_BGTE), rotation):
        yield whose, *pair.unpack(block)


class _Merged:
    """Output and log-sum-exp of the keys seen so far."""

    def __init__(self, *, is_masked: bool) -> None:
        self.out = self.lse = torch.empty(0)
        self._is_masked = is_masked
        self._is_empty = True

    def add(self, out_BHQE: Tensor, lse_BHQ: Tensor, queries: tuple[int, int]) -> None:
        if self._is_empty:  # the first block that is seen is seen by every query
            self.out, self.lse, self._is_empty = out_BHQE, lse_BHQ, False
            return
        self.out = self.out.to(self.lse.dtype)
        out, lse = self.out[:, :, slice(*queries)], self.lse[:, :, slice(*queries)]
        # With p = σ(lse' - lse) the new block's share of the sum, out + p (out' - out): nothing can overflow.
        difference = lse_BHQ - lse
        if self._is_masked:  # of queries that have seen nothing so far, -inf less -inf
            difference.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
        out.lerp_(out_BHQE.to(out.dtype), difference.sigmoid_().unsqueeze(-1))
        torch.logaddexp(lse, lse_BHQ, out=lse)
