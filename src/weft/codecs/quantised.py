"""What codecs that send few bits of every entry have in common: one gathered message, tensor by tensor.

Each of them says how it turns a tensor into scales and codes, and back. The arithmetic is fixed to the last bit, so
that compiled loops (`native/`) write the same messages: sums are trees of pairs, and what the replicas sent is added in
their order. In the steps of a warm-up values travel as they are.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from weft.codecs.base import Bucket, Codec, splits
from weft.codecs.formats.packed_bits import pack, unpack
from weft.codecs.formats.random_bits import key_of, second_key
from weft.codecs.kept import Kept
from weft.codecs.native.quantised import Loops, find_loops
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.exchange.quantised import QuantisedTensor, quantised_tensors
from weft.plan.exchange.warm_up import is_dense


class Quantised(Codec):
    """A codec that sends scales and codes, and keeps nothing from exchange to exchange (`feedback.py` does)."""

    is_compiled = True
    """There are loops that encode."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._dtype = str(bucket.dtype).removeprefix("torch.")
        self._parts = quantised_tensors(bucket.codec, bucket.tensors, self._dtype)
        self._step = 0

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> tuple[Message, ...]:
        self._step = step
        bucket = self._bucket
        return messages_of(bucket.codec, bucket.tensors, self._dtype, num_replicas=bucket.num_replicas, step=step)

    @property
    def is_dense(self) -> bool:
        """True if values travel as they are in this exchange."""
        return is_dense(self._bucket.codec, self._step)

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        given = splits(self._bucket.tensors, values)
        if self.is_dense:
            torch.cat(given, out=message)
            _flag(not_finite, torch.stack(torch.aminmax(message)))
            return
        loops = self._loops(values, message) if self.is_compiled else None
        for part, own in zip(self._parts, given, strict=True):
            message[part.codes_stop : part.stop].zero_()
            if loops is not None:
                key = self.key(part)
                if not loops.encode(self._bucket.codec.name, part, own, message, (key, second_key(key))):
                    not_finite += 1
                continue
            scales, rest, codes = _fields(part, message, self._bucket.dtype)
            if part.num_rest:
                rest.copy_(own[part.num_coded :])
                _flag(not_finite, rest)
            if part.num_coded:
                found, statistics = self.quantise(part, own[: part.num_coded], scales)
                pack(found, part.bits, codes)
                _flag(not_finite, statistics)

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        targets = splits(self._bucket.tensors, values)
        if self.is_dense:
            sums = received.split([one.numel() for one in targets])
            for target, total in zip(targets, sums, strict=True):
                torch.mul(total, scale, out=target)
            return
        loops = self._loops(values, received)
        for part, target in zip(self._parts, targets, strict=True):
            if loops is not None:
                loops.add(self._bucket.codec.name, part, received, target, scale)
                continue
            rows = [_fields(part, row, self._bucket.dtype) for row in received]
            if part.num_rest:
                _add([rest for _, rest, _ in rows], target[part.num_coded :], scale)
            if part.num_coded:
                self.restore(part, [(scales, codes) for scales, _, codes in rows], target[: part.num_coded], scale)

    def restore(
        self, part: QuantisedTensor, rows: list[tuple[torch.Tensor, torch.Tensor]], target: torch.Tensor, scale: float
    ) -> None:
        """Write the sum over replicas of what they sent, scales and packed codes, times `scale`."""
        terms = (self.values_of(part, scales, unpack(codes, part.bits, part.num_coded)) for scales, codes in rows)
        target.copy_(next(terms))
        for term in terms:
            target += term
        target *= scale

    @abstractmethod
    def quantise(
        self, part: QuantisedTensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the scales of these entries; returns their codes, uint8, and numbers of which one is not finite if an
        entry is not."""

    @abstractmethod
    def values_of(self, part: QuantisedTensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """What a replica sent with these scales and codes."""

    def encode_with_memory(
        self, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor, *, kept: Kept, factor: float
    ) -> bool:
        """All of `Feedback.encode` in one go; False, and nothing is done, where that is not compiled."""
        return False

    def _loops(self, values: torch.Tensor, message: torch.Tensor) -> Loops | None:
        """The compiled loops, if they can be used on these."""
        if values.is_cuda or not (values.is_contiguous() and message.stride(-1) == 1):
            return None
        return find_loops(values.dtype)

    def key(self, part: QuantisedTensor) -> int:
        """The key of a tensor's random numbers in this exchange."""
        return key_of(part.tensor.name, self._step, self._bucket.replica)


def _fields(
    part: QuantisedTensor, message: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a tensor's scales, rest and packed codes in a message."""
    scales = message[part.start : part.rest_start].view(dtype)
    rest = message[part.rest_start : part.codes_start].view(dtype)
    return scales, rest, message[part.codes_start : part.codes_stop]


def _flag(not_finite: torch.Tensor, numbers: torch.Tensor) -> None:
    not_finite += (~torch.isfinite(numbers)).any()


def _add(terms: list[torch.Tensor], target: torch.Tensor, scale: float) -> None:
    target.copy_(terms[0])
    for term in terms[1:]:
        target += term
    target *= scale
