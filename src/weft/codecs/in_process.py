"""One bucket's exchange between the codecs of replicas that are all in one process: what all-reduces and gathers do for
real ranks, done in memory.

    begin(step)                             every codec begins
    give(0, values), give(1, values), ...   each replica's first message is made, when its values are there
    take(values)                            the sums, or the messages of all, are decoded; and so on for further messages

Replicas give their values one after the other, from one buffer if they like: only messages are kept of them. What codecs
decode is the same on all replicas, so it is done once; a codec of several messages learns from each of them what it
keeps, so there every replica's takes them all. Sums begin with replica 0 and go on in the order of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.codecs.base import Codec
from weft.plan.exchange.messages import Message


class ExchangeInProcess:
    """Plays the exchange of one bucket."""

    def __init__(self, codecs: Sequence[Codec], device: torch.device) -> None:
        """`codecs`: those of all replicas for this bucket, in their order."""
        self.codecs = tuple(codecs)
        self._device = device
        self._messages: tuple[Message, ...] = ()

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0, dense: bool = False) -> None:
        """A new exchange, as `Codec.begin`; `dense`: values travel as they are, without the codecs."""
        self._messages = () if dense else [codec.begin(step, keep=keep) for codec in self.codecs][0]
        self._sum: torch.Tensor | None = None
        if not dense:
            self._open(0)

    def give(self, replica: int, values: torch.Tensor, not_finite: torch.Tensor) -> None:
        """Take the values of a replica, the next one in their order, which may be overwritten."""
        if self._messages:
            self._encode(0, replica, values, not_finite)
            return
        not_finite += (~torch.isfinite(values.sum())).float()
        self._sum = values.clone() if self._sum is None else self._sum.add_(values)

    def take(self, values: torch.Tensor, not_finite: torch.Tensor, *, scale: float = 1.0) -> None:
        """Make `values` the sum over replicas of what was sent, times `scale`, as it is on every one of them."""
        if self._sum is not None:
            values.copy_(self._sum if scale == 1.0 else self._sum.mul_(scale))
            self._sum = None
            return
        decoders = self.codecs if len(self._messages) > 1 else self.codecs[:1]
        for number in range(len(self._messages)):
            if number:
                self._open(number)
                for replica in range(len(self.codecs)):
                    self._encode(number, replica, values, not_finite)
            for codec in decoders:
                # A codec may write into what it received, and keep it, as a rank may.
                received = self._received if len(decoders) == 1 else self._received.clone()
                codec.decode(number, received, values, scale=scale)
        del self._received

    def end(self, is_made: bool | torch.Tensor) -> None:
        """As `Codec.end`."""
        for codec in self.codecs:
            codec.end(is_made)

    def _open(self, number: int) -> None:
        """Make room for one message of every replica, or for their sum."""
        message = self._messages[number]
        shape = (message.numel,) if message.adds_up else (len(self.codecs), message.numel)
        self._received = torch.empty(shape, dtype=getattr(torch, message.dtype), device=self._device)

    def _encode(self, number: int, replica: int, values: torch.Tensor, not_finite: torch.Tensor) -> None:
        codec, adds_up = self.codecs[replica], self._messages[number].adds_up
        if not adds_up:
            codec.encode(number, values, self._received[replica], not_finite)
        elif replica == 0:
            codec.encode(number, values, self._received, not_finite)
        else:
            message = torch.empty_like(self._received)
            codec.encode(number, values, message, not_finite)
            self._received.add_(message)
