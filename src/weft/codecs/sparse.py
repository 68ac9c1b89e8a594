"""What topk and dgc share: everything but what they add up, and which entries they choose.

An exchange of a bucket, tensor by tensor:

    1  add the values to what was kept; choose entries; write them, and keep the rest     `choose`, of each codec
    2  with fewer bits: round the entries, and keep what rounding took from them
    3  gather the messages of all replicas
    4  add up their entries, in the order of replicas

Where entries are so many that gathering them would send no less than a sum of all elements, which happens while the
compression sets in, they are spread over zeros before they are sent; they are not rounded then.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch

from weft.codecs.base import Bucket, Codec, splits
from weft.codecs.kept import Kept
from weft.codecs.native.sparse import Loops, find_loops
from weft.codecs.random_bits import key_of
from weft.codecs.sparse_message import Entries, SparseMessage, add_entries
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.exchange.sparse import SparseLayout, sparse_layout

_LEAST_SAMPLED = 4096
_SAMPLED_SHARE = 128
"""One element of so many is sampled."""


class State:
    """A flat buffer of state during one encoding: what counts is read, that of the exchange under way is written."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.old = kept.old
        self.is_staged = not isinstance(kept.turn, int)
        """Only the device knows which copy is free: the new state is made beside both."""
        self.new = torch.zeros_like(self.old) if self.is_staged else kept.new

    def part(self, tensor: CodedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What counts of one tensor, and what is written."""
        part = slice(tensor.offset, tensor.offset + tensor.numel)
        return self.old[part], self.new[part]

    def close(self) -> None:
        if self.is_staged:
            self._kept.write(self.new)


class SparseCodec(Codec):
    """The entries of every tensor of a bucket that a `choose` finds worth sending."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.residual = self.make_kept()
        self.step = 0
        self.keep: float | torch.Tensor = 1.0
        self._dtype = str(bucket.dtype).removeprefix("torch.")
        self._layout: SparseLayout
        self._is_spread = False
        """In this exchange entries travel spread over zeros."""

    def make_kept(self) -> Kept:
        bucket = self.bucket
        return Kept(bucket.numel, bucket.dtype, bucket.device, can_fail=bucket.can_fail)

    @abstractmethod
    def open_state(self) -> None:
        """Encoding begins."""

    @abstractmethod
    def choose(self, place: int, values: torch.Tensor, entries: Entries, not_finite: torch.Tensor) -> torch.Tensor:
        """Write the entries of the tensor at this place of the bucket, and its new state. Returns the new residual."""

    @abstractmethod
    def close_state(self) -> None:
        """Encoding is over."""

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> tuple[Message, ...]:
        bucket = self.bucket
        messages = messages_of(bucket.codec, bucket.tensors, self._dtype, num_replicas=bucket.num_replicas, step=step)
        layout = sparse_layout(bucket.codec, bucket.tensors, self._dtype, step)
        self._is_spread = messages[0].adds_up
        if self._is_spread and layout.bits < 32:
            layout = sparse_layout(replace(bucket.codec, bits=32), bucket.tensors, self._dtype, step)
        self._layout = layout
        self.step, self.keep = step, keep
        return messages

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        bucket = self.bucket
        target = message
        if self._is_spread:
            target = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=message.device)
        target.zero_()
        sparse = SparseMessage(self._layout, target, bucket.dtype)
        self.open_state()
        residuals = [
            self.choose(place, own, sparse.entries(place), not_finite)
            for place, own in enumerate(splits(bucket.tensors, values))
        ]
        if self._layout.bits < 32:
            sparse.pack()
            for place, residual in enumerate(residuals):
                add_entries([sparse.entries(place)], residual)
        self.close_state()
        if self._is_spread:
            for place, own in enumerate(self._packed(message)):
                add_entries([sparse.entries(place)], own, is_fresh=True)

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        targets = splits(self.bucket.tensors, values)
        if self._is_spread:
            for own, total in zip(targets, self._packed(received), strict=True):
                torch.mul(total, scale, out=own)
            return
        messages = [SparseMessage(self._layout, row, self.bucket.dtype) for row in received]
        for message in messages:
            message.unpack()
        for place, own in enumerate(targets):
            add_entries([message.entries(place) for message in messages], own, scale=scale, is_fresh=True)

    def sample(self, tensor: CodedTensor) -> tuple[int, int, int]:
        """First element, distance and number of the elements of a tensor from which a threshold is estimated."""
        num_sampled = min(tensor.numel, max(_LEAST_SAMPLED, tensor.numel // _SAMPLED_SHARE))
        stride = tensor.numel // num_sampled
        return key_of(tensor.name, self.step, self.bucket.replica) % stride, stride, num_sampled

    def loops(self, values: torch.Tensor) -> Loops | None:
        """The compiled loops, where these values may be given to them."""
        is_known = isinstance(self.residual.turn, int) and not isinstance(self.keep, torch.Tensor)
        return find_loops() if is_known and not values.is_cuda else None

    def _packed(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor's part of a message of all elements, in which there are no gaps."""
        return list(message.split([tensor.numel for tensor in self.bucket.tensors]))
