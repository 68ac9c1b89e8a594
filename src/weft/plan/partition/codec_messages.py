"""The messages in which a bucket of values travels between replicas, as `[codec]` says: formats and lengths.

A message always has the same length, known from the bucket's: ranks need not tell each other how much comes, buffers
are kept from exchange to exchange, and the bytes are known before the run. The codecs themselves are in `codecs/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.partition.flat_buffers import item_bytes
from weft.plan.partition.wire import sent_bytes
from weft.plan.plan import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a bucket. Codecs that send several wait for the sum of one before they make the next."""

    numel: int
    dtype: str
    """The name of its dtype, as torch prints it."""
    adds_up: bool = True
    """True: the sum of the replicas' messages is all that a replica needs, so it is an all-reduce; False: every replica
    gets the messages of all others."""

    @property
    def num_bytes(self) -> int:
        return self.numel * item_bytes(self.dtype)

    def sent_bytes(self, num_replicas: int) -> int:
        """Bytes that a rank sends when it exchanges this message with its counterparts in other replicas."""
        if self.adds_up:
            return sent_bytes("all-reduce", self.num_bytes, num_replicas)
        return sent_bytes("all-gather", num_replicas * self.num_bytes, num_replicas)


def messages_of(codec: Codec, numel: int, dtype: str) -> tuple[Message, ...]:
    """The messages of a bucket with so many values of a dtype, in the order in which they are sent."""
    match codec.name:
        case "none":
            return (Message(numel=numel, dtype=dtype),)
        case "half":
            return (Message(numel=numel, dtype="bfloat16"),)
    raise ValueError(f'the messages of [codec] name = "{codec.name}" are not known')
