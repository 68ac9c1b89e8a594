"""Models split by regions, with the shards of all ranks run in one process.

Ranks are threads that exchange where real ranks would. Their outputs, and the gathered gradients of every weight, must
equal the whole model's.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from weft.parallel.tensor.local_sizes import LocalSizes
from weft.parallel.tensor.shares import set_count
from weft.plan.partition.tensor import Cut, Region, entries, share_of, shares


class Barrier:
    """An all-reduce between the threads."""

    def __init__(self, tensor: int) -> None:
        self.barrier = threading.Barrier(tensor, timeout=60)
        self.brought: list[Tensor | None] = [None] * tensor

    def add_up(self, rank: int, mine: Tensor) -> Tensor:
        self.brought[rank] = mine.detach()
        self.barrier.wait()
        total = torch.stack([one for one in self.brought if one is not None]).sum(0)
        self.barrier.wait()
        return total


class Spread(torch.autograd.Function):
    """Identity forward, sum of the ranks' gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: Barrier, rank: int) -> Tensor:
        ctx.where = meeting, rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        meeting, rank = ctx.where
        return meeting.add_up(rank, gradient), None, None


class Add(torch.autograd.Function):
    """Sum over ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: Barrier, rank: int) -> Tensor:
        return meeting.add_up(rank, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class Rank:
    """One rank's copy of a model."""

    def __init__(self, model: nn.Module, regions: Sequence[Region], tensor: int, rank: int, meeting: Barrier) -> None:
        self.model = copy.deepcopy(model)
        self.rank, self.meeting = rank, meeting
        self.ranges: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {}
        for region in regions:
            self.out_of = out_of = region.num_units(tensor)
            self.shared = shares(out_of, tensor)[rank]
            for names in region.columns:
                for name in names:
                    self._install_column(name)
            for name in region.rows:
                self._install_row(name, region)
            for cut in region.cuts:
                self._cut(cut)
            for count in region.counts:
                set_count(self.model, count, self.shared, out_of)
            for resized in region.resized:
                module = self.model.get_submodule(resized.module)
                module.forward = LocalSizes(module, resized, self._units(self.shared, out_of)).forward

    @staticmethod
    def _units(shared: tuple[int, int], out_of: int) -> Callable[[int], int]:
        def units(number: int) -> int:
            start, stop = share_of(number, shared, out_of)
            return stop - start

        return units

    def _install_column(self, name: str) -> None:
        layer = self.model.get_submodule(name)
        inner, meeting, rank = layer.forward, self.meeting, self.rank
        channels = None
        if isinstance(layer, _ConvNd) and layer.groups > 1:
            start, stop = share_of(layer.groups, self.shared, self.out_of)
            each = layer.in_channels // layer.groups
            channels = start * each, (stop - start) * each

        def forward(x: Tensor) -> Tensor:
            x = Spread.apply(x, meeting, rank)
            return inner(x if channels is None else x.narrow(1, *channels))

        layer.forward = forward

    def _install_row(self, name: str, region: Region) -> None:
        layer = self.model.get_submodule(name)
        inner, meeting, rank = layer.forward, self.meeting, self.rank
        if isinstance(layer, nn.Embedding):
            ((start, stop),) = entries(region.cuts[0], self.shared, self.out_of)
            padding = layer.padding_idx
            layer.padding_idx = padding - start if padding is not None and start <= padding < stop else None

            def look_up(ids: Tensor) -> Tensor:
                elsewhere = (ids < start) | (ids >= stop)
                made = inner((ids - start).masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
                return Add.apply(made, meeting, rank)

            layer.forward = look_up
            return

        def forward(x: Tensor) -> Tensor:
            bias, layer.bias = layer.bias, None
            made = x @ layer.weight if hasattr(layer, "nf") else inner(x)
            layer.bias = bias
            made = Add.apply(made, meeting, rank)
            if bias is None:
                return made
            return made + (bias.view(-1, *(1 for _ in layer.kernel_size)) if isinstance(layer, _ConvNd) else bias)

        layer.forward = forward

    def _cut(self, cut: Cut) -> None:
        if cut.name in self.ranges:  # tied, and cut under another name
            return
        ranges = entries(cut, self.shared, self.out_of)
        self.ranges[cut.name] = cut.dim, ranges
        tensor = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        whole = tensor[cut.name]
        whole.data = torch.cat([whole.data.narrow(cut.dim, start, stop - start) for start, stop in ranges], cut.dim)

    def run(self, inputs: Sequence[Tensor], cotangent: Tensor, is_split: bool) -> Tensor:
        """Run forward and backward; returns the output, gradients are in the model."""
        output: Tensor = self.model(*inputs)
        if is_split:
            start = self.meeting_start(output.shape[-1])
            cotangent = cotangent[..., start : start + output.shape[-1]]
        output.backward(cotangent)
        return output.detach()

    def meeting_start(self, mine: int) -> int:
        lengths = torch.zeros(len(self.meeting.brought), dtype=torch.long)
        lengths[self.rank] = mine
        return int(self.meeting.add_up(self.rank, lengths)[: self.rank].sum())


def run_split(model: nn.Module, regions: Sequence[Region], tensor: int, *inputs: Tensor) -> float:
    """Largest difference between the split model and the whole one, in outputs, gradients and buffers."""
    whole = copy.deepcopy(model)
    output = whole(*inputs)
    torch.manual_seed(1)
    cotangent = torch.randn_like(output)
    output.backward(cotangent)
    meeting = Barrier(tensor)
    ranks = [Rank(model, regions, tensor, rank, meeting) for rank in range(tensor)]
    is_split = any(region.is_output for region in regions)

    def run(rank: Rank) -> Tensor:
        try:
            return rank.run(inputs, cotangent, is_split)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(tensor) as pool:
        waiting = [pool.submit(run, rank) for rank in ranks]
        errors = [error for error in (one.exception() for one in waiting) if error is not None]
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in real or errors:
            raise error
        outputs = [one.result() for one in waiting]
    output = output.detach()
    found = [torch.cat(outputs, -1)] if is_split else outputs
    worst = max(float((one - output).abs().max()) for one in found)
    return max(worst, _worst_difference(whole, ranks, frozenset(n for r in regions for n in r.partial)))


def _worst_difference(whole: nn.Module, ranks: Sequence[Rank], partial: frozenset[str]) -> float:
    """Largest difference of gathered gradients and buffers."""
    worst = 0.0
    for name, parameter in whole.named_parameters():
        mine = [dict(rank.model.named_parameters())[name] for rank in ranks]
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in mine]
        if name in ranks[0].ranges or name in partial:
            total = torch.zeros_like(expected)
            for rank, gradient in zip(ranks, found, strict=True):
                _put(total, gradient, rank.ranges.get(name))
            found = [total]
        worst = max([worst, *(float((one - expected).abs().max()) for one in found)])
    for name, buffer in whole.named_buffers():
        for rank in ranks:
            mine_ = dict(rank.model.named_buffers())[name]
            expected = buffer
            if name in rank.ranges:
                dim, ranges = rank.ranges[name]
                expected = torch.cat([buffer.narrow(dim, start, stop - start) for start, stop in ranges], dim)
            worst = max(worst, float((mine_.double() - expected.double()).abs().max()) if buffer.numel() else 0.0)
    return worst


def _put(total: Tensor, part: Tensor, where: tuple[int, tuple[tuple[int, int], ...]] | None) -> None:
    """Add a rank's shard to the whole; replicated shards are summed."""
    if where is None:
        total += part
        return
    dim, ranges = where
    first = 0
    for start, stop in ranges:
        total.narrow(dim, start, stop - start).add_(part.narrow(dim, first, stop - start))
        first += stop - start
