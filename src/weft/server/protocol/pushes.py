"""The frames of a push: a head and the messages of codecs, if there are any, then gradients as they are.

    head       the step as 8 bytes, and a byte for each compressed part: 1 if it has a gradient, else 0
    messages   of the parts that are compressed together; empty if none of them has a gradient
    gradients  of every other part, empty if it has none

A server knows the length of every frame from the bucket and the step, and takes a message only if all are right.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.exchange.push_format import STEP_BYTES, PushFormat
from weft.server.protocol.message import Buffer, Malformed

_STEP = struct.Struct("<Q")
assert _STEP.size == STEP_BYTES
MOST_STEPS = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What a worker sends of a bucket."""

    step: int = 0
    """In which it was compressed, counted from 0: what a warm-up sends depends on it."""
    are_there: tuple[tuple[bool, ...], ...] = ()
    """Of all coded parts, those of one dtype together: whether there is a gradient."""
    messages: tuple[tuple[Buffer, ...], ...] = ()
    """Of the coded parts of each dtype; none where none of them is there."""
    plain: tuple[Buffer, ...] = ()
    """Gradients of all other parts; empty for a part without one."""


def pack_push(push: Push) -> list[Buffer]:
    """The frames of a push."""
    if not push.are_there:
        return list(push.plain)
    head = _STEP.pack(push.step) + bytes(itertools.chain.from_iterable(push.are_there))
    return [head, *itertools.chain.from_iterable(push.messages), *push.plain]


def read_push(push_format: PushFormat, frames: Sequence[Buffer]) -> Push:
    """A push from its frames, whose lengths must be those of the format; raises Malformed."""
    if not push_format.coded:
        return Push(plain=_plain(push_format, frames))
    if not frames or len(frames[0]) != push_format.head_bytes:
        raise Malformed(f"a head of {[len(one) for one in frames[:1]]} bytes instead of {push_format.head_bytes}")
    step, flags = _STEP.unpack_from(frames[0])[0], bytes(frames[0][STEP_BYTES:])
    if step >= MOST_STEPS or not set(flags) <= {0, 1}:
        raise Malformed(f"a head of step {step}, or with other numbers than 0 and 1")
    are_there, messages, first_flag, first = [], [], 0, 1
    for coded, expected in zip(push_format.coded, push_format.messages(step), strict=True):
        there = tuple(map(bool, flags[first_flag : first_flag + len(coded.members)]))
        first_flag += len(there)
        lengths = [one.num_bytes if any(there) else 0 for one in expected]
        found = tuple(frames[first : first + len(lengths)])
        if [len(one) for one in found] != lengths:
            raise Malformed(f"messages of {[len(one) for one in found]} bytes instead of {lengths} in step {step}")
        first += len(lengths)
        are_there.append(there)
        messages.append(found)
    plain = _plain(push_format, frames[first:])
    return Push(step=step, are_there=tuple(are_there), messages=tuple(messages), plain=plain)


def _plain(push_format: PushFormat, frames: Sequence[Buffer]) -> tuple[Buffer, ...]:
    found, expected = [len(one) for one in frames], push_format.plain_bytes
    if len(found) != len(expected) or any(one not in (0, full) for one, full in zip(found, expected, strict=True)):
        raise Malformed(f"frames of {found[:4]} bytes instead of {list(expected[:4])}")
    return tuple(frames)
