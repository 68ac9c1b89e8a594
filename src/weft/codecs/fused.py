"""The codecs in fused Triton kernels: what they send and keep is what the others do; needs Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.codecs.base import Bucket, Codec
from weft.codecs.dgc import Dgc
from weft.codecs.feedback import Feedback
from weft.codecs.formats.sparse_message import SparseMessage
from weft.codecs.kept import Kept
from weft.codecs.low_rank import add_kept
from weft.codecs.onebit import OneBit
from weft.codecs.powersgd import PowerSgd
from weft.codecs.quantised import Quantised
from weft.codecs.random_rounding import Qsgd, TernGrad
from weft.codecs.sign import Sign
from weft.codecs.sparse import SparseCodec
from weft.codecs.topk import TopK
from weft.codecs.triton_kernels.low_rank import LowRankKernels, Matrix
from weft.codecs.triton_kernels.one_bit import OneBitKernels, OneBitPlaces
from weft.codecs.triton_kernels.random_rounding import RandomRoundingKernels
from weft.codecs.triton_kernels.signs import SignKernels
from weft.codecs.triton_kernels.sparse import SparseKernels
from weft.plan.exchange.gpu_scratch import MAX_RANK
from weft.plan.exchange.low_rank import rank_of
from weft.plan.exchange.quantised import quantised_tensors


class FusedSign(Sign):
    """Signs, and their majority."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self._kernels = SignKernels(bucket, [part.codes_start for part in self._parts])

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        if self.is_dense:
            super().encode(number, values, message, not_finite)
        else:
            self._kernels.encode(values, message, not_finite)

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        if self.is_dense:
            super().decode(number, received, values, scale=scale)
        else:
            self._kernels.decode(received, values)


class _FusedRounding(Quantised):
    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self._kernels = RandomRoundingKernels(bucket, self._parts)

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        if self.is_dense:
            super().encode(number, values, message, not_finite)
        else:
            self._kernels.encode(values, message, not_finite, self._step)

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        if self.is_dense:
            super().decode(number, received, values, scale=scale)
        else:
            self._kernels.decode(received, values, scale)


class FusedQsgd(_FusedRounding, Qsgd):
    """Random rounding to multiples of a share of the block's norm."""


class FusedTernGrad(_FusedRounding, TernGrad):
    """Random rounding to 0 or the size of the tensor's largest entry."""


class FusedOneBit(Feedback):
    """1-bit SGD with its error feedback."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(OneBit(bucket), bucket)
        parts = quantised_tensors(bucket.codec, bucket.tensors, "float32")
        places = [
            OneBitPlaces(means_at=part.start // 4, rest_at=part.rest_start // 4, bits_at=part.codes_start)
            for part in parts
        ]
        self._kernels = OneBitKernels(bucket, places)
        self._means = Kept(self._kernels.num_means, torch.float32, bucket.device, can_fail=bucket.can_fail)
        """That were sent, and not yet subtracted from what is kept."""

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        if self._codec.is_dense:  # before the first other exchange: there are no means yet
            super().encode(number, values, message, not_finite)
        else:
            self._kernels.encode(values, self._kept, self._means, self._factor, message, not_finite)

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        if self._codec.is_dense:
            super().decode(number, received, values, scale=scale)
        else:
            self._kernels.decode(received, values, scale)

    def end(self, is_made: bool | torch.Tensor) -> None:
        super().end(is_made)
        self._means.end(is_made)

    def tensors(self) -> dict[str, torch.Tensor]:
        self._kernels.settle(self._kept.settle(), self._means.settle())
        return super().tensors()


class _FusedSparse(SparseCodec):
    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self._kernels = SparseKernels(bucket, self.rank)

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        layout, target = self._in_values.layout, message
        if self._is_spread:
            target = torch.empty(layout.num_bytes, dtype=torch.uint8, device=message.device)
        target.zero_()
        sparse = SparseMessage(self._in_values, target, self.bucket.dtype)
        momenta: list[tuple[float, bool]] = self.momenta if isinstance(self, Dgc) else []
        self._kernels.choose(
            values,
            residual=self.residual,
            momentum=self.momentum,
            momenta=momenta,
            keep=self.keep,
            step=self.step,
            sparse=sparse,
            not_finite=not_finite,
        )
        if layout.bits < 32:
            sparse.pack()
            self._add_message(sparse, self.residual, clears=False)
        if self._is_spread:
            self._add_message(sparse, message, is_packed=True)

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        if self._is_spread:
            super().decode(number, received, values, scale=scale)
            return
        layout = self._in_values.layout
        counts = received.view(torch.int32)[:, : layout.num_chunks]
        offsets = received.view(torch.int16)[:, layout.offsets_at // 2 :]
        if layout.bits == 32:
            rows = received.view(torch.float32)[:, layout.values_at // 4 :]
        else:
            messages = [SparseMessage(self._in_values, row, self.bucket.dtype) for row in received]
            for message in messages:
                message.unpack()
            rows = torch.stack([message.row for message in messages])
        self._kernels.add(layout, counts, offsets, rows, values, scale=scale)

    def _add_message(
        self, sparse: SparseMessage, target: torch.Tensor | Kept, *, clears: bool = True, is_packed: bool = False
    ) -> None:
        counts, offsets, row = sparse.counts[None], sparse.offsets[None], sparse.row[None]
        self._kernels.add(sparse.layout, counts, offsets, row, target, clears=clears, is_packed=is_packed)


class FusedTopK(_FusedSparse, TopK):
    """Sends the largest entries, with error feedback."""


class FusedDgc(_FusedSparse, Dgc):
    """Sends the largest entries of gradients with momentum; the momentum of what was sent is cleared."""


class FusedPowerSgd(PowerSgd):
    """Low-rank factors of a bucket's matrices, with error feedback and a warm start."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        matrices = [
            Matrix(
                offset=batch.offset + place * batch.distance,
                num_rows=batch.num_rows,
                num_columns=batch.num_columns,
                rank=batch.rank,
                left_offset=batch.left_offset + place * batch.rank * batch.num_rows,
                right_offset=batch.right_offset + place * batch.rank * batch.num_columns,
            )
            for batch in self._batches
            for place in range(len(batch.names))
        ]
        self._kernels = LowRankKernels(bucket, matrices)

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        if self._is_dense:  # while the host still knows which copy counts
            super().encode(number, values, message, not_finite)
        elif number > 0:
            self._kernels.right(self._first, self._residual, message)
        else:
            self._kernels.left(values, self._residual, self._keep, self._start.old, message, not_finite)
            for stretch in self._rests:
                # Nothing is kept of them, but another plan may have: that is sent before a GPU decides by itself.
                if isinstance(self._residual.turn, int):
                    kept, sent = stretch.among(self._residual.old), stretch.inside(message)
                    add_kept(stretch.among(values), kept, self._keep, out=sent)
                    stretch.among(self._residual.new).zero_()
                else:
                    stretch.inside(message).copy_(stretch.among(values))
                not_finite += stretch.inside(message).isfinite().all().logical_not()
            self._orthonormalise_alone(message)

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        if self._is_dense or number == 0:
            super().decode(number, received, values, scale=scale)
            return
        for stretch in self._rests:
            torch.mul(stretch.inside(self._first), scale, out=stretch.among(values))
        share = 1 / self._bucket.num_replicas
        self._kernels.expand(self._first, received, self._residual, values, scale=scale, share=share)
        self._set_next_start(received)

    def end(self, is_made: bool | torch.Tensor) -> None:
        if isinstance(is_made, bool) or not self._has_begun or self._is_dense:
            super().end(is_made)
            return
        self._has_begun = False
        self._residual.end(is_made)  # kernels find the copy that counts by themselves
        start = self._start
        torch.where(is_made.reshape(1).bool(), start.new, start.old, out=start.old)


def _make_powersgd(bucket: Bucket) -> Codec:
    """Without kernels where a rank has no whole row of any matrix, which ZeRO and slices may leave it."""
    has_rows = any(rank_of(bucket.codec, one) for one in bucket.tensors)
    return FusedPowerSgd(bucket) if has_rows and bucket.codec.rank <= MAX_RANK else PowerSgd(bucket)


FUSED: dict[str, Callable[[Bucket], Codec]] = {
    "topk": FusedTopK,
    "dgc": FusedDgc,
    "onebit": FusedOneBit,
    "sign": FusedSign,
    "qsgd": FusedQsgd,
    "terngrad": FusedTernGrad,
    "powersgd": _make_powersgd,
}
