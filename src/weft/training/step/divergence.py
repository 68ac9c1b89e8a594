"""The divergence check: replicas are compared by checksum, and the first tensor that differs is named.

A checksum is a position-weighted sum of a tensor's bits, so one changed bit or two swapped values change it. It costs
one read of the state and one all-gather of 8 bytes per tensor; the plan's `check_every` says how often.

Where replicas differ between exchanges, the ranks of one are compared at any time, and replicas only while they agree:
their weights, what the next exchange starts from and running statistics, never the optimizer's state. The plan's checks
then come with exchanges, where replicas wait for each other anyway. What codecs keep of values that were not sent is
each replica's own, and never compared; the starting points of powersgd are the same on all, and are.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_gather
from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.errors import DataError, DivergenceError
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.state.batchnorm import running_statistics
from weft.plan.late_merges import merges_late
from weft.sync.base import Sync
from weft.sync.local import LocalSync
from weft.training.data.trees import tensors_of
from weft.training.step.average import WeightAverage

_ROW = 64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DivergenceCheck:
    """Compares weights, optimizer state and buffers between ranks that should hold the same."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sync: Sync
    mesh: Mesh
    layouts: Mapping[str, Layout]
    tied: Mapping[str, Group]
    """Ranks that hold each parameter shared by several stages of a pipeline."""
    average: WeightAverage | None = None

    @torch.no_grad()
    def run(self, step: int) -> None:
        """Raise on every rank if any two replicas differ; collective."""
        self.sync.settle()
        found = self._find(step)
        is_split = self.mesh.size("pipeline") * self.mesh.size("tensor") > 1
        if is_split or self.mesh.num_replicas > 1:  # other ranks have not seen it
            texts = gather_values(found, self.mesh.everyone("control"))
            found = next((text for text in texts if text is not None), None)
        if found is not None:
            raise DivergenceError(found)

    def is_due(self, step: int) -> bool:
        """True if the plan wants a check after this step; of replicas that differ, after the exchange that follows."""
        data = self.mesh.plan.data
        never_agree = merges_late(self.mesh.plan)  # then copies inside each replica are compared
        if not data.check_every or not (self.sync.agrees or never_agree):
            return False
        is_local = self.mesh.plan.replica_axis is not None and not never_agree
        since = data.every if is_local and step > data.switch_step else 1
        return step // data.check_every > (step - since) // data.check_every

    def _find(self, step: int) -> str | None:
        """A description of the first difference among the ranks comparable with this one, if any."""
        inside = self._find_inside(step)
        between = None
        if isinstance(self.sync, LocalSync) and self.sync.agrees:
            between = self._compare(list(self._agreed(self.sync)), self.mesh.between_replicas("control"), step)
        return inside or between

    def _find_inside(self, step: int) -> str | None:
        """The same among the ranks of one replica."""
        everyone, weights = self.mesh.batch_group("control"), dict(self.model.named_parameters())
        not_split = [(what, one) for what, one in self._whole() if not self.layouts[what.partition(" ")[2]].splits]
        alike = self._compare(not_split, self.mesh.group("tensor", "control"), step)
        if self.mesh.plan.data.shard == "nothing":
            found = self._compare([*self._whole(), *self._parts()], everyone, step) or alike
            for name, group in self.tied.items():  # also after a difference was found: other stages take part
                differs = self._compare([(f"weight {name}", weights[name])], group, step)
                found = found or differs
            return found
        # Shards of the data axis exist only on their replicas.
        whole = self._compare(list(self._whole()), everyone, step)
        parts = None
        if self.mesh.plan.replica_axis is None:
            parts = self._compare(list(self._parts()), self.mesh.group("replicate", "control"), step)
        return whole or parts or alike

    def _compare(self, named: list[tuple[str, torch.Tensor]], group: Group, step: int) -> str | None:
        if group.size == 1:
            return None
        # Names are compared first: ranks that hold different tensors cannot be compared one by one.
        names = torch.tensor([zlib.crc32("\n".join(name for name, _ in named).encode())], dtype=torch.int64)
        device = self.mesh.world.device
        sums = torch.stack([names.to(device)[0], *(checksum(tensor).to(device) for _, tensor in named)])
        sums = sums.to(group.device)
        lengths = _gather(torch.tensor([sums.numel()], device=group.device), group)[:, 0].tolist()
        if len(set(lengths)) > 1:
            return _text(step, "the number of tensors in the optimizer state", lengths, group)
        table = _gather(sums, group)
        differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
        if not differing:
            return None
        first = differing[0]
        what = "the list of tensors" if first == 0 else named[first - 1][0]
        return _text(step, what, table[:, first].tolist(), group, others=len(differing) - 1)

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, unless they are sharded, and buffers."""
        if self.mesh.plan.data.shard != "parameters":
            for name, parameter in self.model.named_parameters():
                yield f"weight {name}", parameter
        if self.mesh.plan.data.buffers != "local":
            for name, buffer in self.model.named_buffers():
                yield f"buffer {name}", buffer

    def _parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that the optimizer updates and keeps, and shards of frozen parameters."""
        for flat in self.sync.flats:
            if not flat.trainable:
                for name, part in zip(flat.names, flat.kept_views(flat.mine), strict=True):
                    yield f"weight {name}", part
        for piece in self.sync.pieces:
            if self.sync.flats:
                yield f"weight {piece.name}", piece.tensor
            for key, value in sorted(self.optimizer.state.get(piece.tensor, {}).items()):
                if isinstance(value, torch.Tensor):
                    yield f"optimizer state {piece.name}.{key}", value
            if self.average is not None and self.average.has_begun:
                yield f"average {piece.name}", self.average.means[piece.name]
        if self.mesh.plan.replica_axis is None and self.mesh.sequence_size == 1:  # else ranks have slices of tensors
            yield from self._starts()

    def _starts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What codecs keep alike on all ranks between which they act."""
        kept = {} if self.sync.compressed is None else self.sync.compressed.tensors()
        for name, tensor in kept.items():
            if name.startswith("start/"):
                yield f"codec's {name.replace('/', ' ', 1)}", tensor

    def _agreed(self, sync: LocalSync) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that replicas have alike after an exchange."""
        for name, tensor in sync.own_tensors().items():
            yield name.replace("/", " ", 1), tensor
        yield from self._starts()
        exchanged = {id(one) for one in running_statistics(self.model)}
        for name, buffer in self.model.named_buffers():
            if id(buffer) in exchanged and self.mesh.plan.data.buffers != "local":
                yield f"buffer {name}", buffer
        if self.average is not None and self.average.has_begun:
            for name, mean in self.average.means.items():
                yield f"average {name}", mean


def _text(step: int, what: str, values: list[int], group: Group, *, others: int = 0) -> str:
    ranks = group.ranks
    majority = Counter(values).most_common(1)[0][0]
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != majority]
    same = [rank for rank in ranks if rank not in odd]
    more = f" ({others} more tensors differ too)" if others else ""
    return (
        f"after step {step} replicas are not equal: {what} on rank "
        f"{', '.join(map(str, odd))} differs from rank {', '.join(map(str, same))}{more}; "
        "go back to the last checkpoint, and look for a faulty device or a layer that keeps state of its own"
    )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit number that depends on every bit of a tensor and, within rows of 64 words, on its position."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[min(flat.element_size(), 8)])
    whole = words.numel() // _ROW * _ROW
    weights = torch.arange(1, 2 * _ROW, 2, dtype=torch.int64, device=words.device)
    total = (words[:whole].view(-1, _ROW).sum(0, dtype=torch.int64) * weights).sum()
    rest = words[whole:]
    return total + (rest.to(torch.int64) * weights[: rest.numel()]).sum()


def _gather(values: torch.Tensor, group: Group) -> torch.Tensor:
    table = values.new_empty(group.size, values.numel())
    all_gather(table.view(-1), values, group)
    return table


def require_same_batch(mesh: Mesh, inputs: Any, targets: Any, *, what: str = "batch") -> None:
    """Refuse ranks that are given different samples although they compute the same ones together; collective.

    Their results would belong to no sample, without an error.
    """
    group = mesh.group("pipeline+ring+ulysses+tensor", "control")
    if group.size == 1:
        return
    mine = zlib.crc32(b"")
    for tensor in tensors_of((inputs, targets)):
        mine = zlib.crc32(checksum(tensor).cpu().numpy().tobytes(), mine)
        mine = zlib.crc32(repr(tuple(tensor.shape)).encode(), mine)
    seen = gather_values(mine, group)
    odd = [rank for rank, value in zip(group.ranks, seen, strict=True) if value != seen[0]]
    if odd:
        axes = ", ".join(f"{axis} = {size}" for axis, size in mesh.grid.axes.sizes.items() if size > 1)
        raise DataError(
            f"rank {', '.join(map(str, odd))} was given another {what} than rank {group.ranks[0]}, and they compute "
            f"one together ([axes] {axes}); split data by trainer.data_rank of trainer.data_size, as weft.batches "
            "does, not by rank"
        )
