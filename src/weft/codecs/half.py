"""16 bits on the wire: values are rounded to bfloat16 and added up in it, so that an exchange sends half of float32.

bfloat16 and not float16: it has float32's range, so no change of a weight, however small the learning rate, needs a
scale to survive (float16 loses bits below 6e-5 and everything below 3e-8). It has 8 significant bits where float16 has
11, an error of at most 0.4 % of each value, which falls on the change since the last exchange and not on the weight.
The rounding is to nearest, and what it loses is not sent later.
"""

from __future__ import annotations

import torch

from weft.codecs.base import Bucket, Codec, splits
from weft.plan.exchange.messages import Message, messages_of


class Half(Codec):
    """Rounds to bfloat16. It keeps nothing from exchange to exchange."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> tuple[Message, ...]:
        bucket = self._bucket
        dtype = str(bucket.dtype).removeprefix("torch.")
        return messages_of(bucket.codec, bucket.tensors, dtype, num_replicas=bucket.num_replicas, step=step)

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        parts = splits(self._bucket.tensors, values)
        torch._foreach_copy_(list(message.split([part.numel() for part in parts])), parts)
        not_finite += (~torch.isfinite(message.sum())).float()

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        parts = splits(self._bucket.tensors, values)
        torch._foreach_copy_(parts, list(received.split([part.numel() for part in parts])))
        if scale != 1.0:
            torch._foreach_mul_(parts, scale)
