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

import itertools
from abc import abstractmethod
from dataclasses import replace

import torch

from weft.codecs.base import Bucket, Codec, views
from weft.codecs.formats.random_bits import key_of
from weft.codecs.formats.sparse_message import Entries, Places, SparseMessage, add_entries
from weft.codecs.kept import Kept
from weft.codecs.native.sparse import Loops, find_loops
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.exchange.sparse import SparseLayout, sample_size, sparse_layout

OldNew = tuple[torch.Tensor, torch.Tensor]
"""State that counts, to be read, and that of the exchange under way, to be written; they may be one tensor."""


class SparseCodec(Codec):
    """The entries of every tensor of a bucket that a `choose` finds worth sending."""

    is_exact: bool
    """The largest entries are sent, and not only those of them that reach a threshold."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.residual = self.make_kept()
        self.momentum: Kept | None = None
        self.step = 0
        self.keep: float | torch.Tensor = 1.0
        self._dtype = str(bucket.dtype).removeprefix("torch.")
        self._is_spread = False
        """In this exchange entries travel spread over zeros."""
        self._lay_out(sparse_layout(bucket.codec, bucket.tensors, self._dtype, 0))

    def _lay_out(self, layout: SparseLayout) -> None:
        tensors = self.bucket.tensors
        numels = [tensor.numel for tensor in tensors]
        self._in_values = Places(layout, [(tensor.offset, tensor.numel) for tensor in tensors])
        """Of this exchange's message, in the flat buffer of values; and in a message of all elements, without gaps. The
        layout is one object as long as it does not change."""
        self._in_message = Places(layout, list(zip(itertools.accumulate([0, *numels]), numels, strict=False)))

    def make_kept(self) -> Kept:
        bucket = self.bucket
        return Kept(bucket.num_kept, bucket.dtype, bucket.device, can_fail=bucket.can_fail)

    @abstractmethod
    def choose(self, place: int, values: torch.Tensor, state: list[OldNew], entries: Entries) -> torch.Tensor:
        """Write the entries of the tensor at this place of the bucket, and its new state: residual, and momentum if
        there is one. Returns all that could be sent, and may be anything then."""

    @abstractmethod
    def factors(self, place: int) -> tuple[float, float, float, bool]:
        """Of a tensor: factors on the old residual and on the old momentum; on the new one, if it is Nesterov's; and
        whether it is. Where the host knows `keep`."""

    @abstractmethod
    def rank(self, num_sent: int, numel: int) -> int:
        """The rank, counted from 1 at the largest, of the threshold in the sample of a tensor."""

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> tuple[Message, ...]:
        bucket = self.bucket
        messages = messages_of(bucket.codec, bucket.tensors, self._dtype, num_replicas=bucket.num_replicas, step=step)
        self._is_spread = messages[0].adds_up
        codec = replace(bucket.codec, bits=32) if self._is_spread else bucket.codec
        layout = sparse_layout(codec, bucket.tensors, self._dtype, step)
        if layout != self._in_values.layout:
            self._lay_out(layout)
        self.step, self.keep = step, keep
        return messages

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        places = self._in_values
        target = message
        if self._is_spread:
            target = torch.empty(places.layout.num_bytes, dtype=torch.uint8, device=message.device)
        target.zero_()
        sparse = SparseMessage(places, target, self.bucket.dtype)
        all_kept = [self.residual] if self.momentum is None else [self.residual, self.momentum]
        state = [_open(kept) for kept in all_kept]
        loops = self._loops(values)
        if loops is None:
            self._choose_all(values, state, sparse, not_finite)
        else:
            not_finite.add_(self._choose_compiled(loops, values, state, sparse))
        if places.layout.bits < 32:
            sparse.pack()
            add_entries([sparse], state[0][1], places)
        for kept, (_, new) in zip(all_kept, state, strict=True):
            if not isinstance(kept.turn, int):
                kept.write(new)
        if self._is_spread:
            add_entries([sparse], message, self._in_message, is_fresh=True)

    def _choose_all(
        self, values: torch.Tensor, state: list[OldNew], sparse: SparseMessage, not_finite: torch.Tensor
    ) -> None:
        for place, (offset, numel) in enumerate(sparse.places.parts):
            part = slice(offset, offset + numel)
            own = [(old[part], new[part]) for old, new in state]
            total = self.choose(place, values[part], own, sparse.entries(place))
            not_finite.add_(total.isfinite().all().logical_not_())

    def _choose_compiled(self, loops: Loops, values: torch.Tensor, state: list[OldNew], sparse: SparseMessage) -> bool:
        tensors, entries = self.bucket.tensors, sparse.layout.entries
        return loops.choose(
            values,
            places=sparse.places.numbers,
            samples=[
                (*self.sample(tensor), self.rank(stop - first, tensor.numel))
                for tensor, (first, stop) in zip(tensors, entries, strict=True)
            ],
            factors=[self.factors(place) for place in range(len(tensors))],
            residual=state[0],
            momentum=None if len(state) == 1 else state[1],
            is_masking=len(state) > 1 and self.bucket.codec.masking,
            is_exact=self.is_exact,
            counts=sparse.counts,
            offsets=sparse.offsets,
            row=sparse.row,
        )

    def _loops(self, values: torch.Tensor) -> Loops | None:
        """The compiled loops, where these values may be given to them."""
        is_known = isinstance(self.residual.turn, int) and not isinstance(self.keep, torch.Tensor)
        return find_loops() if is_known and not values.is_cuda else None

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        if self._is_spread:
            parts = zip(self._in_values.parts, self._in_message.parts, strict=True)
            for (there, numel), (here, _) in parts:
                torch.mul(received[here : here + numel], scale, out=values[there : there + numel])
            return
        messages = [SparseMessage(self._in_values, row, self.bucket.dtype) for row in received]
        for message in messages:
            message.unpack()
        add_entries(messages, values, self._in_values, scale=scale, is_fresh=True)

    def sample(self, tensor: CodedTensor) -> tuple[int, int, int]:
        """First element, distance and number of the elements of a tensor from which a threshold is estimated."""
        num_sampled = sample_size(tensor.numel)
        stride = tensor.numel // num_sampled
        return key_of(tensor.name, self.step, self.bucket.replica) % stride, stride, num_sampled

    def end(self, is_made: bool | torch.Tensor) -> None:
        self.residual.end(is_made)
        if self.momentum is not None:
            self.momentum.end(is_made)

    def tensors(self) -> dict[str, torch.Tensor]:
        state = views(self.bucket, self.residual.settle(), "residual")
        return state if self.momentum is None else state | views(self.bucket, self.momentum.settle(), "momentum")


def _open(kept: Kept) -> OldNew:
    """The two copies of a state; where only the device knows which one is free, the new one is made beside both."""
    old = kept.old
    return old, kept.new if isinstance(kept.turn, int) else torch.zeros_like(old)
