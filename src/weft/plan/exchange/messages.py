"""The messages in which a bucket of values travels between replicas, as `[codec]` says: formats and lengths.

A message always has the same length, known from the tensors and the step: ranks need not tell each other how much
comes, buffers are kept from exchange to exchange, and the bytes are known before the run. The codecs themselves are in
`codecs/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.low_rank import message_numels
from weft.plan.exchange.quantised import QUANTISED, quantised_bytes
from weft.plan.exchange.sparse import is_spread, sparse_layout
from weft.plan.exchange.warm_up import SPARSE, is_dense
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


def messages_of(
    codec: Codec, tensors: Sequence[CodedTensor], dtype: str, *, num_replicas: int, step: int
) -> tuple[Message, ...]:
    """The messages of a bucket of these tensors, in the order in which they are sent in a step, counted from 0."""
    numel = sum(tensor.numel for tensor in tensors)
    if is_dense(codec, step):
        return (Message(numel=numel, dtype=dtype),)
    if codec.name == "half":
        return (Message(numel=numel, dtype="bfloat16"),)
    if codec.name in QUANTISED:
        return (Message(numel=quantised_bytes(codec, tensors, dtype), dtype="uint8", adds_up=False),)
    if codec.name == "powersgd":
        return tuple(Message(numel=one, dtype=dtype) for one in message_numels(codec, tensors))
    assert codec.name in SPARSE, f'the messages of [codec] name = "{codec.name}" are not known'
    # Entries from every replica; or all elements, zero where nothing is sent, where their sum takes no more bytes.
    if not tensors or is_spread(codec, dtype, num_replicas=num_replicas, step=step):
        return (Message(numel=numel, dtype=dtype),)
    return (Message(numel=sparse_layout(codec, tensors, dtype, step).num_bytes, dtype="uint8", adds_up=False),)


def num_messages(codec: Codec, step: int) -> int:
    """The most messages of a bucket in a step."""
    return 2 if codec.name == "powersgd" and not is_dense(codec, step) else 1
