"""Gradients in flat buffers that replicas exchange through a codec, after each replica has summed its own.

Of every flat buffer a rank has a part, all of it where nothing is sharded. Large tensors in it (or the ranges of them
that are there) go through `compressed_exchange.py`, buffer by buffer; all small ones are copied together and exchanged
as they are, once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.plan.exchange.codec_memory import NUM_KEPT
from weft.plan.exchange.coded_tensor import CodedTensor, is_coded
from weft.plan.plan import Plan
from weft.sync.exchange.compressed_exchange import CodedBucket, CompressedExchange
from weft.sync.norm import GradientRules
from weft.sync.zero_gradients import Gradients


class ReplicaCompression:
    """What replicas exchange of flat gradients: a codec's messages, and small tensors together."""

    def __init__(
        self, plan: Plan, *, inside: Group, across: Group, whole: Group, device: torch.device, rules: GradientRules
    ) -> None:
        """`whole`: all ranks that keep the same part, which are `inside` × `across`."""
        self._plan, self._inside, self._across, self._whole, self._device = plan, inside, across, whole, device
        self._not_coded = {one.name for one in rules.shared if one.kind == "sum"}
        self._step = 0
        self.lasting: set[str] = set()
        """Tensors that have a gradient also in a step in which no rank uses them: what codecs had kept of others."""
        self._is_over = True

    def attach(self, all_gradients: Sequence[Gradients], *, waits: bool) -> None:
        """Serve these gradients."""
        self._number_of = {gradients: number for number, gradients in enumerate(all_gradients)}
        buckets, self._small = [], []
        for gradients in all_gradients:
            coded = self._coded_members(gradients)
            names = {one.name for one in coded}
            for name, view in zip(gradients.flat.names, gradients.part_views, strict=True):
                if name not in names and view.numel():
                    self._small.append(view)
            buckets.append(CodedBucket(tensors=coded, numel=gradients.part.numel(), dtype=gradients.part.dtype))
        shapes = {
            name: shape for one in all_gradients for name, shape in zip(one.flat.names, one.flat.shapes, strict=True)
        }
        large = [name for name in shapes if name not in self._not_coded and is_coded(self._plan.codec, shapes[name])]
        self._large = frozenset(large)
        dtype = self._small[0].dtype if self._small else torch.float32
        self._together = torch.empty(sum(view.numel() for view in self._small), dtype=dtype, device=self._device)
        self.exchange = CompressedExchange(
            buckets,
            self._plan.codec,
            inside=self._inside,
            across=self._across,
            device=self._device,
            can_fail=True,
            waits=waits and self._plan.axes.sequence == 1,  # those exchange inside a backward pass (`make.py`)
        )
        here = set(self.exchange.names)
        self.exchange.elsewhere = tuple(name for name in large if name not in here)

    def _coded_members(self, gradients: Gradients) -> tuple[CodedTensor, ...]:
        flat, found = gradients.flat, []
        base = gradients.part.storage_offset()
        for member, (name, view) in enumerate(zip(flat.names, gradients.part_views, strict=True)):
            shape = flat.shapes[member]
            if name in self._not_coded or not view.numel() or not is_coded(self._plan.codec, shape):
                continue
            start = flat.flat.kept(member, gradients.part_index)[0]
            offset = int(view.storage_offset()) - int(base)
            found.append(CodedTensor(name=name, shape=shape, offset=offset, numel=view.numel(), start=start))
        return tuple(found)

    def begin(self) -> None:
        self.exchange.begin(self._step)
        self._is_over = False

    def start(self, gradients: Gradients) -> None:
        """A part is complete inside the replica."""
        self.exchange.start(self._number_of[gradients], gradients.part)

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange small tensors too, and wait until all parts are sums over replicas."""
        if self._is_over:
            return
        self._is_over = True
        self.exchange.encode_all()
        if self._small:
            flats = [view.reshape(-1) for view in self._small]
            places = self._together.split([flat.numel() for flat in flats])
            torch._foreach_copy_(list(places), flats)
            self.exchange.not_finite += (~torch.isfinite(self._together.sum())).float()
            all_reduce(self._together, self._whole)
            torch._foreach_copy_(flats, list(places))
        self.exchange.finish()
        self._step += 1

    def keep_gradients_of(self, used: Iterable[str]) -> None:
        """These were used by some rank in this step: from now on something of them may be kept."""
        if self._plan.codec.name in NUM_KEPT and len(self.lasting) < len(self._large):
            self.lasting |= self._large.intersection(used)

    def restart(self, *, steps_done: int) -> None:
        self._step = steps_done
        self.lasting = set(self._large) if steps_done and self._plan.codec.name in NUM_KEPT else set()
        self.exchange.restart()

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "keep": float(self.exchange.keep), "lasting": sorted(self.lasting)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._step, self.exchange.keep = int(state["step"]), float(state["keep"])
        self.lasting = set(state["lasting"])
