"""The optimizer's state as a rank asks servers for it: what has come, and what is missing.

A rank asks all servers at once; each answers bucket by bucket, with the weights that belong to the state. A server that
was lost meanwhile is asked again, and what comes twice is taken once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from weft.server.protocol.frames import tensor_of
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Malformed, Message
from weft.server.protocol.optimizer_state import PartState, read_states


class AskedState:
    """What one rank has asked for."""

    def __init__(self, layouts: Sequence[ServerLayout], expected: Sequence[Collection[int]]) -> None:
        """`expected`: by server, the buckets that this rank holds."""
        self._layouts, self._expected = layouts, expected
        self._answers: dict[tuple[int, int], Message] = {}
        """By server and bucket."""
        self._missing: dict[int, set[int]] = {}

    def begin(self) -> None:
        """Everything is asked for."""
        self._answers = {}
        self._missing = {server: set(expected) for server, expected in enumerate(self._expected)}

    def is_missing(self, server: int) -> bool:
        """A server has not answered all."""
        return bool(self._missing.get(server))

    @property
    def is_here(self) -> bool:
        """All that was asked for has come."""
        return not any(self._missing.values())

    @property
    def versions(self) -> set[int]:
        """The versions of the weights that have come with it."""
        return {message.version for message in self._answers.values()}

    def take(self, message: Message) -> None:
        """An answer. Raises Malformed."""
        server, bucket = message.server, message.bucket
        if bucket not in self._missing.get(server, ()):
            return
        lengths = self._layouts[server].frame_bytes()[bucket]
        if tuple(len(one) for one in message.frames[: len(lengths)]) != lengths:
            raise Malformed(f"bucket {bucket} of weights and state of {[len(one) for one in message.frames][:4]} bytes")
        self._answers[server, bucket] = message
        self._missing[server].discard(bucket)

    def hand_over(self) -> Iterator[tuple[int, int, torch.Tensor, PartState]]:
        """Server, part, weights and the optimizer's state of all that this rank holds; once."""
        answers, self._answers = self._answers, {}
        for (server, bucket), message in answers.items():
            layout = self._layouts[server]
            parts = layout.buckets[bucket]
            read = read_states(message, [layout.parts[part].numel for part in parts], skip=len(parts))
            for place, (part, state) in enumerate(zip(parts, read, strict=True)):
                yield server, part, tensor_of(message.frames[place], layout.dtype(part)), state
