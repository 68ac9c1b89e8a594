"""The bytes of the buffers in which gradients travel, found by playing a step's borrowing from the pool.

Gradients are borrowed and handed back as `sync/zero.py` and `sync/zero_gradients.py` do; a test compares the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from weft.plan.partition.flat_buffers import MAX_IN_FLIGHT, FlatBuffer, Sharding, item_bytes
from weft.plan.partition.zero import choose_free_buffer
from weft.plan.plan import Plan

_Loan = tuple[int, str]
"""Elements and dtype of a buffer of the pool."""


def travelling_bytes(plan: Plan, flats: Sequence[FlatBuffer], *, receives: bool, waits_in_backward: bool) -> int:
    """Bytes of the buffers in which the gradients of flat buffers travel, which are kept for the next step.

    `receives`: reductions need a buffer to receive into; `waits_in_backward`: none of them is waited for in a backward
    pass, because the pass itself waits for other ranks.
    """
    sharding = Sharding.of(plan)
    trainable = [flat for flat in reversed(flats) if flat.trainable]
    if sharding.num_parts > 1:
        max_in_flight = None if waits_in_backward else MAX_IN_FLIGHT
        travelling = _pool_bytes(plan, sharding, trainable, receives=receives, max_in_flight=max_in_flight)
    else:
        travelling = 0
    if sharding.num_replicas > 1:
        travelling += sum(one.part_bytes(one.reduce) for one in trainable if one.reduce != one.accumulate)
    return travelling


def _pool_bytes(
    plan: Plan, sharding: Sharding, flats: Sequence[FlatBuffer], *, receives: bool, max_in_flight: int | None
) -> int:
    """Bytes of the pool after a step in which gradients of these flats left in this order."""
    pool, in_flight = _Pool(), deque[list[_Loan]]()
    num_rounds = min(plan.step.microbatches, 2) if sharding.every_microbatch else 1
    for number in range(2 * num_rounds):  # two steps: the second finds what the first has made
        if number == num_rounds:
            while in_flight:
                pool.take_back(in_flight.popleft())
        whole = [flat.reduce if sharding.every_microbatch else flat.accumulate for flat in flats]
        # Gradients of the root (stage 3) come from the start of the backward pass to its end.
        early = {
            turn: pool.borrow(flat.flat.numel, whole[turn])
            for turn, flat in enumerate(flats)
            if sharding.stays_whole or (sharding.stage == 3 and flat.block is None)
        }
        for turn, flat in enumerate(flats):
            borrowed = [early[turn]] if turn in early else []
            if not sharding.keeps_gradients and turn not in early:
                borrowed.append(pool.borrow(flat.flat.numel, whole[turn]))
            if len(in_flight) == max_in_flight:
                pool.take_back(in_flight.popleft())
            if flat.reduce != whole[turn]:
                borrowed.append(pool.borrow(flat.flat.numel, flat.reduce))
            if receives:
                borrowed.append(pool.borrow(flat.flat.numel, flat.reduce))
            in_flight.append(borrowed)
    return pool.num_bytes


class _Pool:
    """The buffers that `GradientPool` would hold."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: list[_Loan] = []

    def borrow(self, numel: int, dtype: str) -> _Loan:
        fitting = [loan for loan in self._free if loan[1] == dtype]
        place = choose_free_buffer([free for free, _ in fitting], numel)
        if place is not None:
            found = fitting[place]
            self._free.remove(found)
            if found[0] >= numel:
                return found
            self.num_bytes -= found[0] * item_bytes(dtype)
        self.num_bytes += numel * item_bytes(dtype)
        return numel, dtype

    def take_back(self, loans: Sequence[_Loan]) -> None:
        self._free.extend(loans)
