"""The bytes of the buffers from which gradients are sent, found by simulating a step's use of the pool.

Buffers are borrowed and handed back in the order of `sync/zero.py` and `sync/zero_gradients.py`; a test compares both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from weft.plan.partition.flat_buffers import MAX_IN_FLIGHT, FlatBuffer, Sharding, item_bytes
from weft.plan.partition.zero import BufferPool
from weft.plan.plan import Plan


def travelling_bytes(plan: Plan, flats: Sequence[FlatBuffer], *, receives: bool, waits_in_backward: bool) -> int:
    """Bytes of the buffers from which the gradients of flat buffers are sent, which are kept for the next step.

    `receives`: reductions need a buffer to receive into; `waits_in_backward`: none of them is waited for in a backward
    pass, because the pass itself waits for other ranks.
    """
    sharding = Sharding.of(plan)
    trainable = [flat for flat in reversed(flats) if flat.trainable]
    max_in_flight = None if waits_in_backward else MAX_IN_FLIGHT
    narrowed = [one for one in trainable if sharding.num_replicas > 1 and one.reduce != one.accumulate]
    travelling = sum(one.part_bytes(one.reduce) for one in narrowed)
    if sharding.num_parts > 1:
        travelling += _pool_bytes(plan, sharding, trainable, receives=receives, max_in_flight=max_in_flight)
    return travelling


def _pool_bytes(
    plan: Plan, sharding: Sharding, flats: Sequence[FlatBuffer], *, receives: bool, max_in_flight: int | None
) -> int:
    """Bytes of the pool after a step in which gradients of these flats left in this order."""
    pool: BufferPool[int] = BufferPool(int)
    in_flight: deque[list[tuple[int, str]]] = deque()

    def borrow(flat: FlatBuffer, dtype: str) -> tuple[int, str]:
        return pool.borrow(flat.flat.numel, dtype) or flat.flat.numel, dtype

    def complete_oldest() -> None:
        for numel, dtype in in_flight.popleft():
            pool.hand_back(numel, dtype)

    num_rounds = min(plan.step.microbatches, 2) if sharding.every_microbatch else 1
    whole = [flat.reduce if sharding.every_microbatch else flat.accumulate for flat in flats]
    for number in range(2 * num_rounds):  # two steps: the second finds what the first has made
        if number == num_rounds:
            while in_flight:
                complete_oldest()
        # Gradients of the root (stage 3) come from the start of the backward pass to its end.
        early = {
            turn: borrow(flat, whole[turn])
            for turn, flat in enumerate(flats)
            if sharding.stays_whole or (sharding.stage == 3 and flat.block is None)
        }
        for turn, flat in enumerate(flats):
            borrowed = [early[turn]] if turn in early else []
            if not sharding.keeps_gradients and turn not in early:
                borrowed.append(borrow(flat, whole[turn]))
            if len(in_flight) == max_in_flight:
                complete_oldest()
            if flat.reduce != whole[turn]:
                borrowed.append(borrow(flat, flat.reduce))
            if receives:
                borrowed.append(borrow(flat, flat.reduce))
            in_flight.append(borrowed)
    while in_flight:
        complete_oldest()
    return sum(numel * item_bytes(str(dtype)) for dtype, free in pool.free.items() for numel in free)
