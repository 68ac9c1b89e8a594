"""What codecs keep between exchanges, in checkpoints: what was not sent yet, momenta of it, starting points.

    plan-bound part    each rank's own, as it is: the same plan, on hosts with the same ranks, goes on to the bit
    portable part      of kinds that add up (`LINEAR_KINDS`) the mean over replicas, as parts of whole tensors under
                       "KIND/PARAMETER": another plan with the same codec goes on with it, cut and shared out anew

Only the sum over replicas of what was not sent enters the training: under all-reduce another number of replicas shares
the same sum, with local steps, where means are exchanged, each goes on with the mean. Starting points begin anew under
another plan. A plan with another codec, or with none, or with another sync, which exchanges other quantities, has no
use for what is there: that is dropped, with one warning that says how much it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.files.agree import try_on_files
from weft.checkpoint.files.safetensors import Entry, TensorReader, rank_file
from weft.checkpoint.portable import CODEC, MODEL, Part, share_of_replica
from weft.checkpoint.replicas import Mean, averaged
from weft.checkpoint.state import TrainerState
from weft.codecs.base import LINEAR_KINDS
from weft.comm.objects import gather_values
from weft.layout import Layout, Runs
from weft.mesh import Mesh
from weft.plan.partition.host_levels import level_groups
from weft.plan.plan import Plan
from weft.sync.local import LocalSync

_OWN = "codec/"

log = logging.getLogger("weft")


class CodecState:
    """What the codecs of one trainer keep, as a checkpoint has it for any plan."""

    def __init__(self, trainer: TrainerState) -> None:
        self._mesh, self._sync, self._layouts = trainer.mesh, trainer.sync, trainer.layouts
        self._exchanges = trainer.sync.all_compressed
        self._exchange = exchange = self._exchanges[0] if self._exchanges else None
        kept = {} if exchange is None else exchange.tensors()
        self._tensors = {name: kept[name] for name in sorted(kept) if name.partition("/")[0] in LINEAR_KINDS}
        self._ranges = {} if exchange is None else exchange.ranges()
        self._further = trainer.sync.further_compressed if isinstance(trainer.sync, LocalSync) else ()

    def parts(self) -> tuple[list[Part], list[Entry]]:
        """The parts that this rank writes, and all whole tensors, the same on every rank; collective."""
        if isinstance(self._sync, LocalSync):
            self._sync.drain()  # what is under way may still change what was not sent
        names = {_parameter(name) for name in self._tensors}
        shapes = {name: self._layouts[name].global_shape for name in sorted(names)}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}
        # Ranks may lack some: their part of a tensor is empty, or in another stage, or too small to be compressed.
        num_replicas = 0 if self._exchange is None else self._exchange.num_replicas
        tables = gather_values([shapes, dtypes, num_replicas], self._mesh.everyone("control"))
        shapes = {name: shape for table, _, _ in tables for name, shape in table.items()}
        dtypes = {name: dtype for _, table, _ in tables for name, dtype in table.items()}
        self._num_replicas = max(number for _, _, number in tables)
        entries = {
            name: Entry(name=name, dtype=getattr(torch, dtypes[name]), shape=tuple(shapes[_parameter(name)]))
            for name in sorted(dtypes)
        }
        numbers = {name: number for number, name in enumerate(entries)}
        parts = [self._part(entries[name], self._total(name), numbers[name]) for name in self._tensors]
        return parts, list(entries.values())

    @torch.no_grad()
    def _total(self, name: str) -> torch.Tensor:
        """What was not sent of a tensor, in all states that serve exchanges in their turn."""
        kept = [self._tensors[name], *(one.tensors()[name] for one in self._further)]
        return kept[0] if len(kept) == 1 else torch.stack(kept).sum(dim=0)

    def means(self, parts: Iterable[Part]) -> Iterator[torch.Tensor]:
        """The values of these parts: means over replicas, in the unit of the next exchange; collective."""
        if self._exchange is None:
            return iter(())
        if len(self._exchanges) > 1:
            return self._means_here(parts)
        mesh, tensors = self._mesh, [(part.tensor, part.mean) for part in parts if part.mean is not None]
        mean_ = self._sync.mean_ if isinstance(self._sync, LocalSync) else self._exchange.mean_
        return averaged(tensors, mean_, device=mesh.world.device, bucket_bytes=mesh.plan.comm.bucket_bytes)

    @torch.no_grad()
    def _means_here(self, parts: Iterable[Part]) -> Iterator[torch.Tensor]:
        kept = [(exchange.tensors(), float(exchange.keep)) for exchange in self._exchanges]
        for part in parts:
            yield sum((tensors[part.entry.name] * keep for tensors, keep in kept), start=torch.zeros(())) / len(kept)

    def facts(self) -> dict[str, Any]:
        """What the index of a checkpoint says of it, once there are parts."""
        mesh = self._mesh
        return {**_rule(mesh.plan), "num_replicas": self._num_replicas, "hosts": _hosts(mesh)}

    def _part(self, entry: Entry, tensor: torch.Tensor, number: int) -> Part:
        assert self._exchange is not None
        grid, rank, layout = self._mesh.grid, self._mesh.world.rank, self._layout(entry.name)
        place, num_writers = self._exchange.replica, self._exchange.num_replicas
        if self._mesh.everyone("saving").size == 1:  # of replicas in one process, the first writes all
            place, num_writers = 0, 1
        span = share_of_replica(tensor.numel(), place, num_writers, number)
        if not self._is_first_copy(layout):
            span = (0, 0)
        runs = tuple(layout.runs(grid.axes.sizes, grid.coordinates(rank), span))
        mean = Mean(factor=float(self._exchange.keep))
        return Part(kind=CODEC, entry=entry, tensor=tensor, span=span, runs=runs, mean=mean)

    def _layout(self, name: str) -> Layout:
        """The place of this rank's part of a tensor of state in the whole one."""
        return replace(self._layouts[_parameter(name)], flat_range=self._ranges[_parameter(name)])

    def _is_first_copy(self, layout: Layout) -> bool:
        """True on one of the ranks of a replica that have the same state: along axes that neither cut nor share it."""
        plan = self._mesh.plan
        exchanging = {"replicate", "data", "ring", "ulysses"} if plan.replica_axis is None else {plan.replica_axis}
        sharing = set() if plan.data.shard == "nothing" else set(plan.axes.state_axes.split("+"))
        divided = {"pipeline"} | exchanging | sharing | {split.axis for split in layout.splits}
        return all(self._mesh.index(axis) == 0 for axis in plan.axes.order if axis not in divided)

    @torch.no_grad()
    def read(self, reader: TensorReader, *, num_replicas: int) -> list[str]:
        """Go on with what a checkpoint of so many replicas, of the same codec and sync, holds; returns the names of
        what was used."""
        grid, rank = self._mesh.grid, self._mesh.world.rank
        used = [name for name in self._tensors if name in reader.entries]
        kept = [exchange.tensors() for exchange in self._exchanges]
        for name in used:
            assert self._exchange is not None
            tensor = self._tensors[name]
            reader.read(name, tensor, self._layout(name).runs(grid.axes.sizes, grid.coordinates(rank)))
            if self._mesh.plan.data.sync == "all-reduce":  # sums are exchanged, not means
                tensor.mul_(num_replicas / self._exchange.num_replicas)
            for other in kept[1:]:
                other[name].copy_(tensor)
        return used


def has_other_hosts(trainer: TrainerState, index: Mapping[str, Any]) -> bool:
    """True if codecs act between hosts, and ranks are on other ones than those of a checkpoint, or were then: each had
    other slices, so its own state does not fit."""
    saved: list[int] = index.get("codec", {}).get("hosts", [])
    return saved != _hosts(trainer.mesh)


def take_own_codecs(trainer: TrainerState, number: int = 0) -> dict[str, torch.Tensor]:
    """A rank's own state of codecs, not copied, for its own file; of the ranks of this process that of this number."""
    exchanges = trainer.sync.all_compressed
    tensors = exchanges[number].tensors() if exchanges else {}
    return {f"{_OWN}{name}": tensor for name, tensor in tensors.items()}


@torch.no_grad()
def load_own_codecs(trainer: TrainerState, directory: Path, first: int) -> None:
    """Restore what `take_own_codecs` took, from the files of the ranks from `first` on, once the sync has laid out its
    buckets as they were."""
    for number, exchange in enumerate(trainer.sync.all_compressed):
        with TensorReader(directory, [rank_file(first + number)], trainer.mesh.world.device) as reader:
            for name, tensor in exchange.tensors().items():
                numel = tensor.numel()
                reader.read(f"{_OWN}{name}", tensor, [Runs(there=0, here=0, numel=numel)] if numel else [])


def load_portable_codecs(trainer: TrainerState, directory: Path, index: Mapping[str, Any]) -> bool:
    """Go on with the state of codecs that a checkpoint of another plan holds, and say what of it is lost; collective.

    The sync was restarted before: all state is new. Returns False if nothing of it is used.
    """
    files: dict[str, str] = index["tensors"].get(CODEC, {})
    if not files:
        return False
    mesh, saved = trainer.mesh, index["codec"]
    everyone = mesh.everyone("control")
    fits = {key: saved[key] for key in ("name", "sync")} == _rule(trainer.plan)

    def read() -> list[str]:
        if not fits:
            return []
        with TensorReader(directory, sorted(set(files.values())), mesh.world.device) as reader:
            return CodecState(trainer).read(reader, num_replicas=saved["num_replicas"])

    used = {name for names in try_on_files(everyone, "read", directory, read) for name in names}
    lost = sorted(set(files) - used)
    if not lost:
        return True
    weights = sorted({_parameter(name) for name in lost})
    by_file = [(files, lost), (index["tensors"][MODEL], weights)]

    def squares() -> list[float]:
        return [_squares(directory, files, names[mesh.world.rank :: mesh.world.size]) for files, names in by_file]

    found = try_on_files(everyone, "read", directory, squares)
    norms = [math.sqrt(sum(one[place] for one in found)) for place in (0, 1)]
    if mesh.world.rank == 0 and norms[0] > 0:
        log.warning("%s", _loss(directory, saved, trainer.plan, lost, norms=norms))
    return bool(used)


def _loss(directory: Path, saved: Mapping[str, Any], plan: Plan, lost: Sequence[str], *, norms: Sequence[float]) -> str:
    what = "gradients" if saved["sync"] == "all-reduce" else "changes of weights"
    why = f"those {len(lost)} tensors are not compressed any more"
    if saved["name"] != plan.codec.name:
        why = f'[codec] name = "{plan.codec.name}" does not go on with it'
    elif saved["sync"] != plan.data.sync:
        why = f'[data] sync = "{plan.data.sync}" exchanges other quantities than "{saved["sync"]}"'
    # Of the sum over replicas under all-reduce, of their mean with local steps: what the weights would have got.
    norm = norms[0] * (saved["num_replicas"] if saved["sync"] == "all-reduce" else 1)
    return (
        f'{directory} holds {what} that [codec] name = "{saved["name"]}" had not sent yet, and {why}: they are '
        f"dropped, with a norm of {norm:.3g} in all, where the weights' is {norms[1]:.3g}"
    )


def _squares(directory: Path, files: Mapping[str, str], names: Sequence[str]) -> float:
    """The sum of squares of these tensors, read one after the other."""
    with TensorReader(directory, sorted({files[name] for name in names}), torch.device("cpu")) as reader:
        return sum(float(torch.linalg.vector_norm(reader.read_whole(name).double())) ** 2 for name in names)


def _rule(plan: Plan) -> dict[str, str]:
    """What a plan must share with another to go on with the state of its codec."""
    return {"name": plan.codec.name, "sync": plan.data.sync}


def _hosts(mesh: Mesh) -> list[int]:
    """The number of each rank's host, where codecs act between hosts."""
    return list(mesh.world.hosts) if level_groups(mesh.plan, mesh.world.hosts) else []


def _parameter(name: str) -> str:
    return name.partition("/")[2]
