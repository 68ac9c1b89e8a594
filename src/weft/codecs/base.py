"""The contract of a codec: what travels between replicas. When it travels, and between which ranks, is the sync's.

A codec serves one bucket: a flat buffer of floating-point values, of which every replica has its own. For each of the
codec's messages, in order, and on every replica alike, the sync calls

    encode(number, values, message)                    this replica's message of its values
    all-reduce or gather of the message                as `messages[number].adds_up` says
    decode(number, received, num_replicas, values)     after the last one, `values` are the mean over replicas

All replicas decode the same bits by the same arithmetic, so they end with equal values. Formats and lengths of messages
are in `plan/partition/codec_messages.py`, where the bytes of an exchange are added up without torch. Nothing here waits
for a device, and nothing is exchanged: replicas in one process use a codec just as ranks do.

`sync/local.py` serves codecs of one message that adds up, and does not save their state: `half` needs no more.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from weft.plan.partition.codec_messages import Message


class Codec(Protocol):
    """The compression of one bucket. Methods with a body need not be overridden."""

    messages: tuple[Message, ...]
    """What is sent, in order; a codec of several messages makes each after it has decoded the one before."""

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor) -> None:
        """Write message `number` for this replica's values, which stay as they are."""

    def decode(self, number: int, received: torch.Tensor, num_replicas: int, values: torch.Tensor) -> None:
        """Take what was received: the sum of the replicas' messages, or, where they do not add up, one row per replica.

        With the last message `values` become the mean over replicas, as exactly as the codec transmits it.
        """

    def state(self) -> dict[str, Any]:
        """Plain values and tensors that a replica carries from exchange to exchange, such as what it has not sent yet;
        the same plan resumes from them bit-exactly."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        return
