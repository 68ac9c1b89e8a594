"""16 bits on the wire: values are rounded to bfloat16 and added up in it, so that an exchange sends half of float32.

bfloat16 and not float16: it has float32's range, so no change of a weight, however small the learning rate, needs a
scale to survive (float16 loses bits below 6e-5 and everything below 3e-8). It has 8 significant bits where float16 has
11, an error of at most 0.4 % of each value, which falls on the change since the last exchange and not on the weight.
The rounding is to nearest, and what it loses is not sent later.
"""

from __future__ import annotations

import torch

from weft.codecs.base import Codec
from weft.plan.partition.codec_messages import messages_of
from weft.plan.plan import Codec as CodecSection


class Half(Codec):
    """Rounds to bfloat16. It keeps nothing from exchange to exchange."""

    def __init__(self, numel: int) -> None:
        self.messages = messages_of(CodecSection(name="half"), numel, "float32")

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor) -> None:
        message.copy_(values)

    def decode(self, number: int, received: torch.Tensor, num_replicas: int, values: torch.Tensor) -> None:
        values.copy_(received)
        values /= num_replicas
