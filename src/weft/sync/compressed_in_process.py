"""Gradients of all data ranks in one process, exchanged through codecs as real ranks do: one model, one update.

Ranks that exchange gradients at every step hold the same weights, so one model is enough for all of them. A *worker* is
what is left of such a rank: its part of the batch, and what its codec keeps. The microbatches of the workers follow one
another, and what one of them has made is encoded when its last one is over:

    worker 0   microbatch  microbatch ┤ messages of its gradient
    worker 1                          ┤ microbatch  microbatch ┤ messages
    ...                                                        ... ┤ sums, decoded: one gradient, one update

Inside is the sync of a rank without others, which collects the gradient of one worker at a time, in whatever precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm.group import Group
from weft.plan.exchange.codec_memory import NUM_KEPT
from weft.plan.exchange.coded_tensor import coded_tensors, is_coded
from weft.plan.partition.wire import Member, assign_buckets
from weft.plan.plan import Plan
from weft.sync.base import PipelineSync, Totals
from weft.sync.compressed_all_reduce import clip_to_share
from weft.sync.exchange.compressed_exchange import CodedBucket, CompressedExchange
from weft.sync.in_process import CodecsInProcess
from weft.sync.norm import GradientRules, NormParts, spoil_norm
from weft.sync.wrapping_sync import WrappingSync

Tensors = Callable[[], Sequence[torch.Tensor]]


class CompressedInProcess(WrappingSync):
    """The sync of one rank, which trains for all workers in turn."""

    def __init__(self, inner: PipelineSync, group: Group, plan: Plan, *, buffers: Tensors = list) -> None:
        """`group`: any of this rank alone. `buffers` looks up those of the model that every worker changes, of which
        the first one's count (`[data] buffers = "broadcast"`)."""
        super().__init__(inner)
        self.num_workers = plan.axes.data_ranks
        self._plan, self._buffers = plan, buffers
        self._norm_parts = NormParts(inner.pieces, GradientRules())
        pieces = [*inner.pieces]
        is_inside = [is_coded(plan.codec, piece.layout.global_shape) for piece in pieces]
        self._dense = _Flat([piece.tensor for piece, coded in zip(pieces, is_inside, strict=True) if not coded])
        coded_pieces = [piece for piece, coded in zip(pieces, is_inside, strict=True) if coded]
        members = [
            Member(numel=one.tensor.numel(), item_bytes=one.tensor.element_size(), kind=str(one.tensor.dtype))
            for one in coded_pieces
        ]
        filled = [[coded_pieces[place] for place in inside] for inside in _buckets(members, plan.comm.bucket_bytes)]
        lasts = plan.codec.name in NUM_KEPT
        self._coded = [_Flat([piece.tensor for piece in inside], lasts=lasts) for inside in filled]
        device = pieces[0].tensor.device
        coded = [
            CodedBucket(
                tensors=coded_tensors(
                    [(piece.name, piece.layout.global_shape, piece.tensor.numel()) for piece in inside]
                ),
                numel=flat.numel,
                dtype=flat.dtype,
            )
            for inside, flat in zip(filled, self._coded, strict=True)
        ]
        self.exchanges = [
            CompressedExchange(
                coded,
                plan.codec,
                inside=group.alone,
                across=group.alone,
                device=device,
                can_fail=True,
                place=(worker, self.num_workers),
            )
            for worker in range(self.num_workers)
        ]
        """What each worker's codecs keep."""
        self._played: list[CodecsInProcess] = []
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._step = self._num_microbatches = 0

    @property
    def compressed(self) -> CompressedExchange:
        return self.exchanges[0]

    @property
    def all_compressed(self) -> Sequence[CompressedExchange]:
        return self.exchanges

    @torch.no_grad()
    def begin(self) -> None:
        self.inner.begin()
        first = self.exchanges[0]
        for exchange in self.exchanges:
            exchange.momenta = first.momenta
            exchange.begin(self._step)
        self._played = [
            CodecsInProcess([exchange.codecs[number] for exchange in self.exchanges], self._zero.device)
            for number in range(len(self._coded))
        ]
        for one in self._played:
            one.begin(self._step, keep=first.keep)
        for flat in (self._dense, *self._coded):
            flat.begin()
        self._num_microbatches = 0
        self._before = [one.clone() for one in self._buffers()]
        self._arm_last()

    def arm(self) -> None:
        """Of each worker by itself."""

    def _arm_last(self) -> None:
        if (self._num_microbatches + 1) % self._plan.step.microbatches == 0:
            self.inner.arm()

    def end_microbatch(self) -> None:
        self.inner.end_microbatch()
        self._num_microbatches += 1
        worker, left = divmod(self._num_microbatches, self._plan.step.microbatches)
        if not left:
            self._end_worker(worker - 1)
            if worker < self.num_workers:
                self.inner.begin()
        self._arm_last()

    @torch.no_grad()
    def _end_worker(self, worker: int) -> None:
        """Encode the gradient of a worker, whose last microbatch is over."""
        self.inner.finish(self._zero, self._zero, with_norm=False)
        if self._plan.codec.clip:
            clip_to_share([piece.tensor for piece in self.pieces], self._plan.codec.clip, self.num_workers)
        not_finite = self.exchanges[worker].not_finite
        not_finite += self._dense.add_gradients()
        for flat, exchange in zip(self._coded, self._played, strict=True):
            exchange.give(worker, flat.take_gradients(), not_finite)
        buffers = self._buffers()
        if worker == 0:
            self._after_first = [one.clone() for one in buffers]
        is_last = worker == self.num_workers - 1
        for one, value in zip(buffers, self._after_first if is_last else self._before, strict=True):
            one.copy_(value)

    @torch.no_grad()
    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        not_finite = torch.stack([exchange.not_finite for exchange in self.exchanges])
        ignored = torch.zeros_like(self.exchanges[0].not_finite)  # later messages are made of what was looked at
        for flat, exchange in zip(self._coded, self._played, strict=True):
            exchange.take(flat.values, ignored)
        for flat in (self._dense, *self._coded):
            flat.hand_over()
        self._step += 1
        norm = self._norm_parts.norm(loss_sum.device) if with_norm else None
        return spoil_norm(Totals(loss_sum=loss_sum, count=count, norm=norm), (not_finite > 0).sum().to(loss_sum))

    def decide(self, *, is_made: bool | torch.Tensor, factor: float | torch.Tensor | None) -> None:
        for exchange in self.exchanges:
            exchange.end(is_made=is_made, factor=1.0 if factor is None else factor)

    def restart(self, *, steps_done: int) -> None:
        self._step = steps_done
        for flat in self._coded:
            flat.used = [bool(steps_done)] * len(flat.used)
        for exchange in self.exchanges:
            exchange.restart()

    def state(self) -> dict[str, Any]:
        order = list(reversed(range(len(self.pieces))))  # that of real ranks before they have agreed on one
        names = zip(self.compressed.names, [used for flat in self._coded for used in flat.used], strict=True)
        return {
            "order": order,
            "agreed": False,
            "ready": [],
            "step": self._step,
            "keep": float(self.compressed.keep),
            "lasting": [name for name, used in names if used],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._step, names = int(state["step"]), iter(self.compressed.names)
        for flat in self._coded:
            flat.used = [next(names) in state["lasting"] for _ in flat.used]
        for exchange in self.exchanges:
            exchange.keep = float(state["keep"])


class _Flat:
    """Gradients of some tensors in one flat buffer: those of one worker, or their sum."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, lasts: bool = False) -> None:
        """`lasts`: what was used once always has a gradient, because something of it may be kept."""
        self._tensors, self._lasts = tuple(tensors), lasts
        self.used = [False] * len(self._tensors)
        """The tensors of which some worker had a gradient."""
        self.numel = sum(one.numel() for one in tensors)
        self.dtype = tensors[0].dtype if tensors else torch.float32
        device = tensors[0].device if tensors else None
        self.values = torch.zeros(self.numel, dtype=self.dtype, device=device)
        self._views = [
            part.view(one.shape)
            for part, one in zip(self.values.split([one.numel() for one in tensors]), tensors, strict=True)
        ]
        self.begin()

    def begin(self) -> None:
        if not self._lasts:
            self.used = [False] * len(self._tensors)
        self._is_begun = False

    def _gradients(self) -> list[torch.Tensor]:
        found = []
        for place, tensor in enumerate(self._tensors):
            if tensor.grad is not None:
                self.used[place] = True
            found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        return found

    def take_gradients(self) -> torch.Tensor:
        """This worker's gradients."""
        torch._foreach_copy_(self._views, self._gradients())
        return self.values

    def add_gradients(self) -> torch.Tensor:
        """Add this worker's gradients to those of the ones before; returns 1 if some are not finite."""
        gradients = self._gradients()
        if not gradients:
            return torch.zeros(1, device=self.values.device)
        if self._is_begun:
            torch._foreach_add_(self._views, gradients)
        else:
            torch._foreach_copy_(self._views, gradients)
        self._is_begun = True
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
        return (~torch.isfinite(norms.sum())).float()

    def hand_over(self) -> None:
        """Give the optimizer's tensors the sums; what no worker used has no gradient."""
        for tensor, view, used in zip(self._tensors, self._views, self.used, strict=True):
            tensor.grad = view if used else None


def _buckets(members: Sequence[Member], bucket_bytes: int) -> Sequence[Sequence[int]]:
    return assign_buckets(members, bucket_bytes, first_bytes=bucket_bytes) if members else ()
