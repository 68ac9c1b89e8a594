"""Error feedback: what a codec did not send is added to what the next exchange is given.

    x = g + memory · e        the codec sends a message of x
    e = x - what was sent

So nothing is lost, only late: the sum of all that was sent and of what is kept is the sum of all that was given. It
wraps any codec of one message.
"""

from __future__ import annotations

import torch

from weft.codecs.base import Bucket, Codec, splits, views
from weft.codecs.kept import Kept
from weft.codecs.quantised import Quantised
from weft.plan.exchange.messages import Message


class Feedback(Codec):
    """A codec that remembers what it did not send."""

    def __init__(self, codec: Quantised, bucket: Bucket) -> None:
        self._codec, self._bucket = codec, bucket
        self._kept = Kept(bucket.num_kept, bucket.dtype, bucket.device, can_fail=bucket.can_fail)
        self._factor: float | torch.Tensor = 1.0

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> tuple[Message, ...]:
        if isinstance(keep, torch.Tensor):
            keep = keep.to(self._bucket.dtype).reshape(()) if keep.is_cuda else keep.item()
        self._factor = keep * self._bucket.codec.memory
        return self._codec.begin(step)

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        kept, factor = self._kept, self._factor
        if not self._codec.is_dense and not isinstance(factor, torch.Tensor):
            if self._codec.encode_with_memory(values, message, not_finite, kept=kept, factor=factor):
                return
        tensors = self._bucket.tensors
        for own, error in zip(splits(tensors, values), splits(tensors, kept.old), strict=True):
            own += error * factor
        self._codec.encode(number, values, message, not_finite)
        errors = kept.new if isinstance(kept.turn, int) else torch.zeros_like(values)
        self._codec.decode(number, message if self._codec.is_dense else message.unsqueeze(0), errors)
        for own, sent in zip(splits(tensors, values), splits(tensors, errors), strict=True):
            torch.sub(own, sent, out=sent)
        if not isinstance(kept.turn, int):
            kept.write(errors)

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        self._codec.decode(number, received, values, scale=scale)

    def end(self, is_made: bool | torch.Tensor) -> None:
        self._kept.end(is_made)

    def tensors(self) -> dict[str, torch.Tensor]:
        return views(self._bucket, self._kept.settle(), "residual")
