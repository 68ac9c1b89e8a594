"""Bytes that a rank sends in a whole run under a plan with a codec, without running it: the arithmetic of the studies.

Everything counts: the steps of a warm-up, tensors that travel as they are, and the collectives of real ranks, in which
gathered messages are passed on (W - 1 of them per rank). "By message" is the figure of publications: the bytes of a
whole gradient over those of one rank's own messages, whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from weft.plan.exchange.coded_tensor import coded_tensors, is_coded
from weft.plan.exchange.messages import messages_of
from weft.plan.late_merges import exchanges_after
from weft.plan.partition.wire import sent_bytes
from weft.plan.plan import Plan

ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Dense fp32 bytes of a run, exchanged at every step, over those of a plan."""

    sent: float
    """By the bytes that a rank sends."""
    by_message: float
    """By the bytes of a rank's own messages."""


def compression(shapes: Sequence[tuple[str, tuple[int, ...]]], plan: Plan, num_steps: int) -> Ratios:
    """Of a run of so many steps, of a model with parameters of these names and shapes."""
    num_ranks = plan.axes.data_ranks
    numel_of = {name: math.prod(shape) for name, shape in shapes}
    total = sum(numel_of.values()) * ITEM_BYTES
    coded = coded_tensors([(name, shape, numel_of[name]) for name, shape in shapes if is_coded(plan.codec, shape)])
    rest = total - sum(one.numel for one in coded) * ITEM_BYTES
    sent = own = 0
    for step in range(num_steps):
        if plan.replica_axis is not None and not exchanges_after(plan.data, step + 1):
            continue
        messages = messages_of(plan.codec, coded, "float32", num_replicas=num_ranks, step=step) if coded else ()
        sent += sum(one.sent_bytes(num_ranks) for one in messages) + sent_bytes("all-reduce", rest, num_ranks)
        own += sum(one.num_bytes for one in messages) + rest
    dense = num_steps * sent_bytes("all-reduce", total, num_ranks)
    return Ratios(sent=dense / sent, by_message=num_steps * total / own)


def shapes_of(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(one.shape)) for name, one in model.named_parameters()]
