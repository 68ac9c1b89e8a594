"""The contract of a codec: what travels between replicas. When it travels, and between which ranks, is the sync's.

A codec serves one bucket: a flat buffer of floating-point values in which tensors lie (`CodedTensor`), of which every
replica has its own. Tensors are compressed each by itself. In every exchange, on every replica alike, the sync calls

    begin(step)                                   the messages of this exchange
    encode(0, values, message)                    this replica's first message of its values
    all-reduce or gather of the message           as `adds_up` says
    decode(0, received, values)                   and so on for each further message; after the last one, `values` are
                                                  the sum over replicas of what was sent, times `scale`
    end(is_made)                                  once it is known whether the exchange counts

*State* (what was not sent yet, momenta, starting points) changes with `end(True)` only: of a step that is skipped,
because some gradient in it is not finite, nothing is left (`kept.py`).

All replicas decode the same bits by the same arithmetic, so they end with equal values. Random numbers are a function
of the tensor's name, the step and the replica (`formats/random_bits.py`), so ranks that hold copies of one tensor
draw alike. Formats and lengths of messages are in `plan/exchange/messages.py`, where the bytes of an exchange are
added up without torch. Nothing here waits for a device, and nothing is exchanged: replicas in one process use a codec
just as ranks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.messages import Message
from weft.plan.plan import Codec as CodecSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What a codec is made for."""

    codec: CodecSection
    tensors: tuple[CodedTensor, ...]
    numel: int
    """Length of the flat buffer of values, with gaps between tensors."""
    dtype: torch.dtype
    """Of the values: float32 or float64."""
    device: torch.device
    replica: int
    num_replicas: int
    can_fail: bool = True
    """Exchanges may end with `end(False)`, so that the state before must be kept beside the new one."""
    only_decodes: bool = False
    """Of a parameter server: it encodes nothing, so it keeps nothing."""

    @property
    def num_kept(self) -> int:
        """Elements of state that is laid out like the values."""
        return 0 if self.only_decodes else self.numel


class Codec(Protocol):
    """The compression of one bucket. Methods with a body need not be overridden."""

    learns_from_decoding: bool = False
    """`decode` changes what is kept, and not `encode` alone."""

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> tuple[Message, ...]:
        """A new exchange; returns what is sent, in order. `step` counts from 0.

        `keep`: factor on what is kept from the last exchange, because its values had another unit (on a GPU it may be a
        tensor of one element). It comes on top of the plan's own factor, `[codec] memory`.
        """

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        """Write message `number` of this replica. With the first, `values` are this replica's, and may be overwritten;
        later they hold nothing. `not_finite`, one float32 element on the same device, grows if a value is not finite;
        what is written is without meaning then."""

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        """Take what was received: the sum of the replicas' messages, or, where they do not add up, one row per replica.

        With the last message the tensors in `values` become the sum over replicas of what was sent, times `scale`;
        gaps between tensors stay as they are. `received` stays as it is: replicas in one process share it.
        """

    def end(self, is_made: bool | torch.Tensor) -> None:
        """The exchange counts, or nothing of it is left; a tensor, on a GPU: 1 or 0."""
        return

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state, flat, by "KIND/NAME" for each tensor's name, such as "residual/head.weight". A checkpoint saves
        these, and a resume copies into them. Kinds that add up over replicas are in `LINEAR_KINDS`."""
        return {}


LINEAR_KINDS = ("residual", "momentum")
"""Kinds of state of which only the sum over replicas matters to another plan, in the shape of the tensor's part here:
what was not sent, and momenta of it."""


def views(bucket: Bucket, flat: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """Each tensor's part of a flat buffer that is laid out like the values, by "KIND/NAME"."""
    return {f"{kind}/{one.name}": flat[one.offset : one.offset + one.numel] for one in bucket.tensors}


def splits(tensors: Sequence[CodedTensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Each tensor's part of a flat buffer that is laid out like the values."""
    return [flat[one.offset : one.offset + one.numel] for one in tensors]
