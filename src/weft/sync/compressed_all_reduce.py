"""All-reduce data parallelism through a codec: large gradients leave compressed, small ones and the tail as they are.

Gradients that a codec compresses have buckets of their own, in the order in which they become ready, and leave through
`compressed_exchange.py` while the backward pass still runs. All others share the dense buckets, the last of which
carries the tail: its last word counts the ranks with a gradient that is not finite, so that all of them skip the step
and none changes what its codec keeps.

With `[codec] clip` each rank first scales its gradient to a norm of at most clip / √replicas, as DGC does. The norm is
known after the backward pass only, so nothing overlaps with it then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.group import Group
from weft.parallel.zero.flat_parameters import Piece
from weft.plan.exchange.codec_memory import NUM_KEPT
from weft.plan.exchange.coded_tensor import coded_tensors, is_coded
from weft.plan.partition.wire import CODEC_TAIL_WORDS
from weft.plan.plan import Plan
from weft.sync.allreduce import AllReduce
from weft.sync.base import Totals
from weft.sync.exchange.compressed_exchange import CodedBucket, CompressedExchange
from weft.sync.norm import GradientRules, spoil_norm


class CompressedAllReduce(AllReduce):
    """Sums gradients over the ranks of a group, those of large tensors as a codec transmits them."""

    _num_extra_words = CODEC_TAIL_WORDS

    def __init__(
        self,
        pieces: Sequence[Piece],
        group: Group,
        plan: Plan,
        *,
        inside: Group,
        across: Group,
        device: torch.device,
        waits_in_backward: bool,
        rules: GradientRules,
    ) -> None:
        """`group`: all ranks that sum gradients, which are `inside` × `across` (`exchange/compressed_exchange.py`)."""
        self._codec, self._device, self._has_slices = plan.codec, device, inside.size > 1
        self._coded = coded_places(pieces, plan, rules)
        self._step = 0
        self._lasting: set[int] = set()
        self._exchange = CompressedExchange(
            (),
            plan.codec,
            inside=inside,
            across=across,
            device=device,
            can_fail=True,
            waits=not waits_in_backward,
        )
        super().__init__(pieces, group, bucket_bytes=plan.comm.bucket_bytes, rules=rules)

    @property
    def compressed(self) -> CompressedExchange:
        return self._exchange

    def begin(self) -> None:
        self._exchange.finish()  # of a step that ended in an error, before buckets are laid out anew
        super().begin()
        self._exchange.begin(self._step)

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        if self._codec.clip:
            self._clip()
        totals = super().finish(loss_sum, count, with_norm=with_norm, compute_s=compute_s)
        self._step += 1
        if self._codec.name in NUM_KEPT and len(self._lasting) < len(self._coded):  # once used, something may be kept
            self._lasting |= {index for index in self._coded if self._parameters[index].grad is not None}
        return spoil_norm(totals, self._buckets.tail[-1].clone())

    def decide(self, *, is_made: bool | torch.Tensor, factor: float | torch.Tensor | None) -> None:
        self._exchange.end(is_made=is_made, factor=1.0 if factor is None else factor)

    def restart(self, *, steps_done: int) -> None:
        self._step = steps_done
        self._lasting = set(self._coded) if steps_done and self._codec.name in NUM_KEPT else set()
        self._exchange.restart()

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "step": self._step,
            "keep": float(self._exchange.keep),
            "lasting": [self._names[index] for index in sorted(self._lasting)],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._exchange.lay_out(())  # what was kept is read again, so that nothing need be carried over
        super().load_state(state)
        self._step, self._exchange.keep = int(state["step"]), float(state["keep"])
        self._lasting = {self._index[name] for name in state["lasting"]}

    def _agree_on_order(self) -> None:
        if self._has_slices:  # what a rank keeps is of its slices, which other buckets would cut elsewhere
            self._order_agreed = True
        else:
            super()._agree_on_order()

    @torch.no_grad()
    def _lay_out(self, order: list[int]) -> None:
        super()._lay_out(order)
        inside: dict[int, list[int]] = {}
        for index in order:
            if index in self._coded:
                inside.setdefault(self._bucket_of[index], []).append(index)
        self._number_of = {bucket: number for number, bucket in enumerate(sorted(inside))}
        self._exchange.lay_out_again([self._coded_bucket(bucket, inside[bucket]) for bucket in sorted(inside)])

    def _coded_bucket(self, bucket: int, inside: Sequence[int]) -> CodedBucket:
        flat = self._buckets.buckets[bucket]
        named = [(self._names[i], tuple(self._parameters[i].shape), self._parameters[i].numel()) for i in inside]
        return CodedBucket(tensors=coded_tensors(named), numel=flat.numel(), dtype=flat.dtype)

    def _launch_full(self) -> None:
        if not self._codec.clip:
            super()._launch_full()

    def _launch(self, bucket: int) -> None:
        flat = self._buckets.buckets[bucket]
        if bucket in self._number_of:
            self._exchange.start(self._number_of[bucket], flat)
            return
        if bucket < len(self._buckets.buckets) - 1:  # that of the tail was looked at when the tail was filled
            self._look_at(flat)
        super()._launch(bucket)

    def _fill_tail(self, loss_sum: torch.Tensor, count: torch.Tensor, unused: list[int], compute_s: float) -> None:
        super()._fill_tail(loss_sum, count, unused, compute_s)
        last = self._buckets.buckets[-1]
        self._look_at(last[: last.numel() - self._buckets.tail.numel()])
        self._exchange.encode_all()
        self._buckets.tail[-1] = self._exchange.not_finite[0] > 0

    def _look_at(self, flat: torch.Tensor) -> None:
        self._exchange.not_finite += (~torch.isfinite(flat.sum())).float()

    def _wait_for_all(self) -> None:
        super()._wait_for_all()
        self._exchange.finish()

    @torch.no_grad()
    def _clip(self) -> None:
        clip_to_share(self._parameters, self._codec.clip, self._group.size)


def clip_to_share(parameters: Sequence[torch.Tensor], clip: float, num_replicas: int) -> None:
    """Scale a replica's gradients to a norm of at most clip / √replicas, so that their sum has about that of `clip`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, torch.clamp(clip / math.sqrt(num_replicas) / (norm + 1e-6), max=1.0))


def coded_places(pieces: Sequence[Piece], plan: Plan, rules: GradientRules) -> frozenset[int]:
    """The pieces that a codec compresses, by place: large ones whose gradients no other rank of the replica holds too,
    for those are summed over their holders afterwards."""
    shared = {one.name for one in rules.shared if one.kind == "sum"}
    return frozenset(
        place
        for place, piece in enumerate(pieces)
        if piece.name not in shared and is_coded(plan.codec, piece.tensor.shape)
    )
