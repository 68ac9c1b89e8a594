"""What workers' codecs have sent, as values: each worker's messages are decoded alone.

A server keeps nothing for codecs: what was not sent yet is the worker's. Signs are votes, so they have no size: they
are counted here, and `to_majority` makes the update of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.codecs.base import Bucket, Codec, splits
from weft.codecs.make import make_codec
from weft.plan.exchange.push_format import CodedParts
from weft.plan.exchange.warm_up import is_dense
from weft.server.protocol.frames import tensor_of
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Buffer
from weft.server.protocol.pushes import Push

_ALIGNED_BYTES = 16
"""Of memory that compiled loops read numbers from; a frame may begin anywhere."""


class Decoder:
    """The codecs of one server's buckets."""

    def __init__(self, layout: ServerLayout) -> None:
        self._layout, self._section = layout, layout.settings.compression
        self._codecs: dict[tuple[int, int], Codec] = {}
        """By bucket, and by number of the parts in it that are compressed together."""

    def votes(self, step: int) -> bool:
        """What was sent in a step, counted from 0, are signs."""
        return self._section.name == "sign" and not is_dense(self._section, step)

    def decode(self, bucket: int, push: Push, *, scale: float) -> Iterator[tuple[int, torch.Tensor]]:
        """What was sent of compressed parts, times `scale` unless it is a vote: place in the bucket, and values in
        memory of their own."""
        groups = self._layout.pushes[bucket].coded
        for number, (group, are_there) in enumerate(zip(groups, push.are_there, strict=True)):
            if not any(are_there):
                continue
            values = self._decode(bucket, number, group, push, scale)
            parts = zip(group.members, splits(group.tensors, values), are_there, strict=True)
            yield from ((place, part) for place, part, is_there in parts if is_there)

    def _decode(self, bucket: int, number: int, group: CodedParts, push: Push, scale: float) -> torch.Tensor:
        key = bucket, number
        if key not in self._codecs:
            self._codecs[key] = self._make_codec(group)
        codec = self._codecs[key]
        values = torch.empty(group.numel, dtype=getattr(torch, group.dtype))
        messages = codec.begin(push.step)
        for place, (message, frame) in enumerate(zip(messages, push.messages[number], strict=True)):
            received = _aligned(frame, message.dtype)
            codec.decode(place, received if message.adds_up else received.unsqueeze(0), values, scale=scale)
        return values

    def _make_codec(self, group: CodedParts) -> Codec:
        return make_codec(
            Bucket(
                codec=self._section,
                tensors=group.tensors,
                numel=group.numel,
                dtype=getattr(torch, group.dtype),
                device=torch.device("cpu"),
                replica=0,
                num_replicas=1,
                can_fail=False,
                only_decodes=True,
            )
        )


def to_majority(votes: torch.Tensor) -> None:
    """Replace sums of signs by the sign of most; a tie counts as positive."""
    votes.copy_(votes >= 0).mul_(2).sub_(1)


def _aligned(frame: Buffer, dtype: str) -> torch.Tensor:
    """The values of a frame, for loops that are compiled for addresses of numbers."""
    found = tensor_of(frame, dtype)
    return found if found.data_ptr() % _ALIGNED_BYTES == 0 else found.clone()
