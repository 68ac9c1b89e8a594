"""topk and dgc on a GPU: accumulate, find, write in one pass over the gradient and the state; needs Triton.

    sample       what would be sent at some elements: the k-th largest of them is a threshold (`selection.py`)
    accumulate   new state from old; the places of elements that reach the threshold are noted, block by block
    select       the k-th largest of the noted ones, exactly, digit by digit of their bits
    emit         the entries, in order, and zeros into the state where they were

After `accumulate` only noted elements are read. A block that has more of them than there is room for notes is read
whole instead, so nothing depends on the room. If fewer than k of topk's elements reach its threshold, which is only an
estimate there, the whole tensor is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from weft.codecs.triton_kernels import selection, sparse_passes
from weft.codecs.triton_kernels.common import BLOCK, NUM_WARPS, num_blocks
from weft.codecs.triton_kernels.tables import Bucket, Kept, Numbers, Table, Turns, are_aligned
from weft.plan.exchange.gpu_scratch import NOTES
from weft.plan.exchange.sparse import CHUNK_NUMEL, SparseLayout, sample_size


class Message(Protocol):
    """A message, or one of values that are rounded later."""

    @property
    def layout(self) -> SparseLayout: ...

    counts: torch.Tensor
    offsets: torch.Tensor
    row: torch.Tensor


class SparseKernels:
    """The passes over one bucket, of dgc where there is a momentum, else of topk."""

    def __init__(self, bucket: Bucket, rank: Callable[[int, int], int]) -> None:
        """`rank`: that of a threshold in the sample, of the number of entries that are sent and of all elements."""
        self._bucket, self._rank = bucket, rank
        tensors, device = bucket.tensors, bucket.device
        self._is_dgc = bucket.codec.name == "dgc"
        self._sampled = [sample_size(one.numel) for one in tensors]
        samples_at = [sum(self._sampled[:place]) for place in range(len(tensors))]
        fields, samples, first_block, packed_at = [], [], 0, 0
        for one, num_sampled, at in zip(tensors, self._sampled, samples_at, strict=True):
            fields.append([one.offset, one.numel, first_block, packed_at])
            crc = zlib.crc32(one.name.encode())
            samples.append([one.offset, at, num_sampled, one.numel // num_sampled, crc])
            first_block += num_blocks(one.numel)
            packed_at += one.numel
        self._blocks = Table([num_blocks(one.numel) for one in tensors], fields, device)
        self._chunks = Table([num_blocks(one.numel, CHUNK_NUMEL) for one in tensors], fields, device)
        self._samples = Table([num_blocks(number) for number in self._sampled], samples, device)
        self._is_aligned = are_aligned([number for one in tensors for number in (one.offset, one.numel)], 4)
        self._numbers, self._turns = Numbers(device), Turns(device)
        self._sizes = torch.zeros(sum(self._sampled), dtype=torch.float32, device=device)
        self._notes = torch.zeros(max(first_block, 1) * NOTES, dtype=torch.int16, device=device)
        self._noted = torch.zeros(max(first_block, 1), dtype=torch.int32, device=device)
        self._found = torch.zeros(2, self._chunks.num_programs, dtype=torch.int32, device=device)
        self._of_samples = selection.Selection(len(tensors), device)
        self._of_noted = selection.Selection(len(tensors), device)
        self._momenta: list[tuple[float, bool]] = []
        self._layout: SparseLayout | None = None
        self._rooms = self._ranks = self._factors = torch.zeros(0)

    def choose(
        self,
        values: torch.Tensor,
        *,
        residual: Kept,
        momentum: Kept | None,
        momenta: Sequence[tuple[float, bool]],
        keep: float | torch.Tensor,
        step: int,
        sparse: Message,
        not_finite: torch.Tensor,
    ) -> None:
        """Write the entries into the message, which is zero, and the new state."""
        self._prepare(sparse.layout, momenta)
        first_v, second_v, turn = self._turns(residual)
        first_u, second_u, _ = self._turns(residual if momentum is None else momentum)
        keeps = self._numbers.float64(keep), self._numbers.float64(keep, self._bucket.codec.memory)
        state = (values, first_u, second_u, first_v, second_v, turn, *keeps, self._factors)
        blocks, chunks, samples = self._blocks, self._chunks, self._samples
        options = {"IS_DGC": self._is_dgc, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
        with torch.cuda.device_of(values):
            sparse_passes.sample[(samples.num_programs,)](
                samples.tensor_of, samples.fields, *state, self._sizes, step, self._bucket.replica,
                WIDTH=samples.width, enable_fp_fusion=False, **options,
            )  # fmt: skip
            thresholds = self._of_samples.of_sizes(samples, self._sizes, self._ranks)
            sparse_passes.accumulate[(blocks.num_programs,)](
                blocks.tensor_of, blocks.fields, *state, thresholds, self._notes, self._noted, not_finite,
                IS_ALIGNED=self._is_aligned, NOTES=NOTES, WIDTH=blocks.width, enable_fp_fusion=False, **options,
            )  # fmt: skip
            noted = selection.Noted(
                table=chunks, first=first_v, second=second_v, turn=turn, thresholds=thresholds, notes=self._notes,
                noted=self._noted, room=NOTES,
            )  # fmt: skip
            state_of = self._of_noted.of_noted(noted, self._rooms, must_fill=not self._is_dgc)
            found = self._found
            sparse_passes.count[(chunks.num_programs,)](
                chunks.tensor_of, chunks.fields, *noted.pointers, state_of, found, found.stride(0),
                BLOCK=BLOCK, NOTES=NOTES, WIDTH=chunks.width, num_warps=NUM_WARPS,
            )  # fmt: skip
            before = found.cumsum(1, dtype=torch.int32) - found
            sparse_passes.emit[(chunks.num_programs,)](
                chunks.tensor_of, chunks.fields, *noted.pointers, state_of, first_u, second_u, before,
                before.stride(0), self._rooms, sparse.counts, sparse.offsets, sparse.row,
                CLEARS_MOMENTUM=self._is_dgc and self._bucket.codec.masking,
                BLOCK=BLOCK, NOTES=NOTES, WIDTH=chunks.width, num_warps=NUM_WARPS,
            )  # fmt: skip

    def add(
        self,
        layout: SparseLayout,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        rows: torch.Tensor,
        target: torch.Tensor | Kept,
        *,
        scale: float = 1.0,
        clears: bool = True,
        is_packed: bool = False,
    ) -> None:
        """target += scale × the entries of each row of messages, in their order; `clears`: from zeros on. `is_packed`:
        there are no gaps between tensors in the target."""
        self._prepare(layout, self._momenta)
        pair = (target, target, self._turns.first) if isinstance(target, torch.Tensor) else self._turns(target)
        is_aligned = self._is_aligned and pair[0].data_ptr() % 16 == 0
        ends = counts.cumsum(1, dtype=torch.int32)
        chunks = self._chunks
        with torch.cuda.device_of(rows):
            sparse_passes.add[(chunks.num_programs,)](
                chunks.tensor_of, chunks.fields, *pair, self._rooms, counts, counts.stride(0), ends, ends.stride(0),
                offsets, offsets.stride(0), rows, rows.stride(0), self._numbers.float64(scale),
                CLEARS=clears, IS_PACKED=is_packed, IS_ALIGNED=is_aligned, NUM_ROWS=rows.shape[0],
                CHUNK=CHUNK_NUMEL, BLOCK=BLOCK, WIDTH=chunks.width, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip

    def _prepare(self, layout: SparseLayout, momenta: Sequence[tuple[float, bool]]) -> None:
        """Tables of what changes now and then: the density while it sets in, the optimizer's momentum."""
        device = self._bucket.device
        if layout is not self._layout:
            self._layout = layout
            rooms, ranks = [], []
            for one, (first, stop) in zip(self._bucket.tensors, layout.entries, strict=True):
                rooms.append([stop - first, first])
                ranks.append([self._rank(stop - first, one.numel) if stop - first < one.numel else 0])
            self._rooms, self._ranks = (_to_device(table, torch.int64, device) for table in (rooms, ranks))
        if list(momenta) != self._momenta or not self._factors.numel():
            self._momenta = list(momenta)
            factors = [[float(factor), float(is_nesterov)] for factor, is_nesterov in momenta] or [[0.0, 0.0]]
            self._factors = _to_device(factors, torch.float64, device)


def _to_device(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Without waiting for it."""
    table = torch.tensor(rows, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
