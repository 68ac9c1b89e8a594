"""What a worker does not train, as one of its ranks gives it to the servers and takes it from them.

    first worker ── INITIAL_FIXED, before its first weights ──> servers keep it, and change nothing of it
    any start of a worker ── ASK_FIXED, once its first clock begins ──> FIXED, to the ranks that hold it

Frozen parameters and buffers are the first worker's, whatever seed or file others began from. A start of a worker takes
them once, and not again in a later session: buffers that a model changes (running statistics) are each worker's own
from then on. The first worker takes them, too, because an earlier start of it may have given others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Buffer, Malformed, Message


class FixedValues(Protocol):
    """The tensors of a rank, by name."""

    def frame(self, name: str, start: int, stop: int) -> Buffer:
        """The bytes of elements of a flattened tensor, in memory of their own."""

    def write(self, name: str, start: int, stop: int, frame: Buffer) -> None:
        """Take elements of it."""


class FixedExchange:
    """One rank's account of it."""

    def __init__(self, layouts: Sequence[ServerLayout], place: int, values: FixedValues | None) -> None:
        """`values`: None for a rank that has all it needs."""
        self._layouts, self._place, self._values = layouts, place, values
        self.missing = [
            {number for number in range(len(one.fixed_buckets)) if values and place in one.fixed_holders(number)}
            for one in layouts
        ]
        """By server, buckets that have not come."""

    @property
    def is_here(self) -> bool:
        return not any(self.missing)

    def first_frames(self, server: int) -> list[tuple[int, tuple[Buffer, ...]]]:
        """The buckets that this rank speaks for."""
        layout, found = self._layouts[server], []
        for bucket, parts in enumerate(layout.fixed_buckets):
            if self._values is not None and layout.fixed_holders(bucket)[0] == self._place:
                ranges = [self._range(layout, part) for part in parts]
                found.append((bucket, tuple(self._values.frame(*one) for one in ranges)))
        return found

    def take(self, message: Message) -> None:
        """A bucket has come; raises Malformed."""
        layout, bucket = self._layouts[message.server], message.bucket
        if self._values is None or bucket not in self.missing[message.server]:
            return
        if (found := [len(one) for one in message.frames]) != list(layout.fixed_bytes(bucket)):
            raise Malformed(f"bucket {bucket} of what is not trained, of {found[:4]} bytes")
        for part, frame in zip(layout.fixed_buckets[bucket], message.frames, strict=True):
            self._values.write(*self._range(layout, part), frame)
        self.missing[message.server].discard(bucket)

    def _range(self, layout: ServerLayout, part: int) -> tuple[str, int, int]:
        one = layout.fixed_parts[part]
        return layout.settings.fixed[one.tensor].name, one.start, one.stop
