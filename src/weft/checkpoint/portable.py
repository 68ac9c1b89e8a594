"""The portable part of a checkpoint: weights and optimizer state as parts of whole tensors under the unsplit model's
names, whatever the plan.

Nothing is gathered: a rank knows where its part lies in each whole tensor, and writes or reads only that. Replicas
divide what they all hold, so that each byte is written once:

    data 2:           rank 0 writes the first half of each tensor, rank 1 the second
    data 2, ZeRO:     each writes its own range
    tensor 2:         each writes its rows or columns, and half of what the tensor axis does not split
    tied over stages: the earlier stage writes

Replicas that differ between exchanges write parts of their mean (`replicas.py`), and what codecs keep is always such
a mean (`codec_state.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.checkpoint.files.safetensors import DTYPE_WORDS, Entry, TensorReader
from weft.checkpoint.local_parts import held_parameters
from weft.checkpoint.replicas import Mean, State, counted_numbers, replica_means
from weft.checkpoint.state import Averaging, TrainerState
from weft.checkpoint.tied_names import further_names
from weft.comm.objects import gather_values
from weft.errors import CheckpointError
from weft.layout import Layout, Range, Runs
from weft.parallel.state.buffers import consensus_buffers, persistent_buffers
from weft.plan.partition.grid import Grid

KINDS = MODEL, OPTIMIZER, AVERAGE, CODEC = "model", "optimizer", "average", "codec"
_ALIGNED_NUMEL = 1024
"""Where replicas divide a tensor, their parts begin at multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor that a checkpoint holds."""

    kind: str
    name: str
    tensor: torch.Tensor
    """This rank's part of it."""
    layout: Layout
    mean: Mean | None = None
    """Where replicas have values of their own: how their mean is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The elements that this rank writes of one tensor."""

    kind: str
    entry: Entry
    """The whole tensor."""
    tensor: torch.Tensor
    """The part that this rank holds."""
    span: Range
    """The elements of that part, flattened, which it writes."""
    runs: tuple[Runs, ...]
    """Their places in the whole tensor; `here` is counted from the start of the span."""
    mean: Mean | None = None
    """Where the mean over replicas is written, instead of the tensor: how it is taken. Every replica needs all of these
    parts, also those of which it writes nothing."""


def share_of_replica(numel: int, place: int, num_replicas: int, number: int) -> Range:
    """The range that one of several replicas writes. `number`, of the tensor, moves small tensors from rank to rank.

    share_of_replica(4000, 0, 2, 0) -> (0, 2048);   share_of_replica(4000, 0, 2, 1) -> (2048, 4000)
    """
    place = (place + number) % num_replicas
    each = -(-numel // (num_replicas * _ALIGNED_NUMEL)) * _ALIGNED_NUMEL
    return min(place * each, numel), min((place + 1) * each, numel)


def replicas_of(layout: Layout, grid: Grid, rank: int) -> tuple[int, ...]:
    """The ranks of a stage that hold the same part of a tensor as this one, including itself."""
    sharing = set() if layout.flat_range is None else set(grid.axes.state_axes.split("+"))
    divided = sharing | {split.axis for split in layout.splits} | {"pipeline"}
    return grid.ranks_along(tuple(axis for axis in grid.axes.order if axis not in divided), rank)


class Portable:
    """The portable part of a checkpoint of one trainer."""

    def __init__(self, trainer: TrainerState) -> None:
        """Collective."""
        self._trainer = trainer
        self.means = replica_means(trainer)
        """The means over replicas, where these differ."""
        self._held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
        self._further = further_names(trainer.named_model)
        self._first = {name: owner for owner, names in self._further.items() for name in names}
        names = (*self._held, *persistent_buffers(trainer.named_model))
        mine = {name: list(trainer.layouts[name].global_shape) for name in names}
        self._pipeline = trainer.mesh.group("pipeline", "control")
        stages = gather_values(mine, self._pipeline)
        self.shapes: dict[str, list[int]] = {name: one for shapes in stages[::-1] for name, one in shapes.items()}
        """Global shapes of the whole model's parameters and persistent buffers."""
        self._written_elsewhere = {name for shapes in stages[: self._pipeline.index] for name in shapes}
        """Tied tensors of this stage that an earlier stage writes."""

    def parts(self) -> tuple[list[Part], dict[str, list[Entry]]]:
        """The parts that this rank writes, and all whole tensors by kind, the same on every rank; collective."""
        states, problems = self._states()
        return self._parts_of([*self._weights({}), *states, *self._averages()], problems)

    def weight_parts(self, average: Averaging | None) -> tuple[list[Part], dict[str, list[Entry]]]:
        """The same of the model alone, with averaged weights if given; collective."""
        return self._parts_of(self._weights(average.means if average is not None and average.has_begun else {}), [])

    def _parts_of(self, tensors: Iterable[Stored], problems: list[str]) -> tuple[list[Part], dict[str, list[Entry]]]:
        kept = self._kept(tensors, problems)
        mine = [
            (one.kind, one.name, str(one.tensor.dtype).removeprefix("torch."), one.layout.global_shape) for one in kept
        ]
        mesh = self._trainer.mesh
        found = gather_values(problems, mesh.everyone("control"))
        if any(found):
            raise CheckpointError(list(dict.fromkeys(problem for part in found for problem in part)))
        stages = gather_values(mine, self._pipeline)
        whole: dict[str, list[Entry]] = {kind: [] for kind in KINDS}
        for table in stages:
            for kind, name, dtype, shape in table:
                whole[kind].append(Entry(name=name, dtype=getattr(torch, dtype), shape=tuple(shape)))
        parts = [self._part(number, one) for number, one in enumerate(kept)]
        return [part for part in parts if part.runs or part.mean is not None], whole

    def _kept(self, tensors: Iterable[Stored], problems: list[str]) -> list[Stored]:
        """All that this stage writes; notes what cannot be."""
        kept = []
        for one in tensors:
            parameter = one.name.rsplit("/", 1)[0] if one.kind == OPTIMIZER else self._first.get(one.name, one.name)
            if parameter in self._written_elsewhere:
                continue
            if one.tensor.dtype not in DTYPE_WORDS:
                problems.append(
                    f'"{one.name}" has dtype {one.tensor.dtype}, which safetensors cannot hold; use another'
                )
            kept.append(one)
        return kept

    def _weights(self, means: Mapping[str, torch.Tensor]) -> list[Stored]:
        """Parameters, or `means` where there is one, and buffers."""
        model, layouts, found = self._trainer.named_model, self._trainer.layouts, []
        for name, held in self._held.items():
            mean = None if self.means is None or held.piece is None or name in means else self.means.of_weight
            tensor = means.get(name, held.tensor)
            found.append(Stored(kind=MODEL, name=name, tensor=tensor, layout=held.layout, mean=mean))
        agreed = consensus_buffers(model, self._trainer.mesh)
        for name, buffer in persistent_buffers(model).items():
            mean = None if self.means is None else self.means.of_buffer(buffer)
            found.append(Stored(kind=MODEL, name=name, tensor=agreed[name], layout=layouts[name], mean=mean))
        return self._under_all_names(found)

    def _averages(self) -> list[Stored]:
        average = self._trainer.average
        if average is None or not average.has_begun:
            return []
        found = [
            Stored(kind=AVERAGE, name=name, tensor=mean, layout=self._held[name].layout)
            for name, mean in average.means.items()
        ]
        return self._under_all_names(found)

    def _under_all_names(self, found: list[Stored]) -> list[Stored]:
        return [*found, *(replace(one, name=other) for one in found for other in self._further.get(one.name, ()))]

    def _part(self, number: int, one: Stored) -> Part:
        mesh, tensor = self._trainer.mesh, one.tensor.detach()
        grid, rank = mesh.grid, mesh.world.rank
        # Of replicas in one process, the first writes all.
        replicas = replicas_of(one.layout, grid, rank) if mesh.everyone("saving").size > 1 else [rank]
        span = share_of_replica(tensor.numel(), replicas.index(rank), len(replicas), number)
        if one.kind == MODEL and self._first.get(one.name, one.name) not in self._held:
            # A buffer may differ between replicas; a checkpoint then has one replica's, not pieces of several.
            is_mine = (replicas.index(rank) + number) % len(replicas) == 0
            span = (0, tensor.numel() if is_mine else 0)
        runs = one.layout.runs(grid.axes.sizes, grid.coordinates(rank), span)
        entry = Entry(name=one.name, dtype=tensor.dtype, shape=tuple(one.layout.global_shape))
        return Part(kind=one.kind, entry=entry, tensor=tensor, span=span, runs=tuple(runs), mean=one.mean)

    @torch.no_grad()
    def read_model(self, reader: TensorReader, stored_as: Mapping[str, str] | None = None) -> None:
        """Read this rank's part of the model, without publishing it. `stored_as`: the tensors to read, and their names
        in the files; None for all under their own."""
        buffers = persistent_buffers(self._trainer.named_model)
        parts = {name: (held.tensor, held.layout) for name, held in self._held.items()}
        parts |= {name: (buffer, self._trainer.layouts[name]) for name, buffer in buffers.items()}
        names = {name: name for name in parts} if stored_as is None else stored_as
        for name, stored in names.items():
            self._read(reader, stored, *parts[name])

    @torch.no_grad()
    def read_average(self, reader: TensorReader) -> None:
        """Read this rank's part of the average."""
        assert self._trainer.average is not None
        for name, mean in self._trainer.average.means.items():
            self._read(reader, name, mean, self._held[name].layout)

    def load_optimizer(
        self, reader: TensorReader, entries: Iterable[str], numbers: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Load through the optimizer's own `load_state_dict`, which knows on which device each state must be."""
        optimizer = self._trainer.optimizer
        keys: dict[str, list[str]] = {}
        # A 0-d parameter has only 0-d states; those of other parameters tell which states are one number per tensor.
        per_tensor = {"step"}
        for entry in entries:
            name, key = entry.rsplit("/", 1)
            if name in self._held:
                keys.setdefault(name, []).append(key)
            if self.shapes[name] and not reader.entries[entry].shape:
                per_tensor.add(key)
        names = [name for _, inside in self._named_groups() for name in inside]
        state = {
            number: {key: self._read_state(reader, name, key, is_split=key not in per_tensor) for key in keys[name]}
            for number, name in enumerate(names)
            if name in keys
        }
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for group, inside in self._named_groups():
            for name in inside:
                group.update(numbers.get(name, {}))

    def optimizer_numbers(self) -> dict[str, dict[str, float]]:
        """Each parameter's numbers that the optimizer counts in its parameter groups, not in its state; collective."""
        mine: dict[str, dict[str, float]] = {}
        counted = counted_numbers(self._trainer.optimizer)
        for own, (_, inside) in zip(counted, self._named_groups(), strict=True):
            mine |= {name: own for name in inside if own}
        stages = gather_values(mine, self._pipeline)
        return {name: own for part in stages for name, own in part.items()}

    def _named_groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """The optimizer's parameter groups, each with the names of its parameters."""
        name_of = {id(piece.tensor): piece.name for piece in self._trainer.sync.pieces}
        groups = self._trainer.optimizer.param_groups
        return [(group, [name_of[id(parameter)] for parameter in group["params"]]) for group in groups]

    def _read_state(self, reader: TensorReader, name: str, key: str, *, is_split: bool) -> torch.Tensor:
        """One state of one parameter, read into its present tensor if there is one."""
        held, entry = self._held[name], reader.entries[f"{name}/{key}"]
        if not is_split or entry.shape != held.layout.global_shape:
            return reader.read_whole(entry.name)
        assert held.piece is not None
        state = self._trainer.optimizer.state.get(held.piece, {}).get(key)
        if not isinstance(state, torch.Tensor) or (state.shape, state.dtype) != (held.tensor.shape, entry.dtype):
            state = torch.empty(held.tensor.shape, dtype=entry.dtype, device=held.tensor.device)
        self._read(reader, entry.name, state, held.layout)
        return state

    def _read(self, reader: TensorReader, entry: str, part: torch.Tensor, layout: Layout) -> None:
        grid = self._trainer.mesh.grid
        reader.read(entry, part, layout.runs(grid.axes.sizes, grid.coordinates(self._trainer.mesh.world.rank)))

    def _states(self) -> tuple[list[Stored], list[str]]:
        """All that the optimizer keeps, and what cannot be saved."""
        own: dict[str, torch.Tensor] = {}
        problems = []
        kind = type(self._trainer.optimizer).__name__
        for name, held in self._held.items():
            kept = self._trainer.optimizer.state.get(held.piece, {}) if held.piece is not None else {}
            for key, value in kept.items():
                if not isinstance(value, torch.Tensor | int | float):
                    problems.append(
                        f'{kind} keeps a {type(value).__name__} "{key}" for "{name}", which weft cannot save; '
                        "use an optimizer whose state is tensors and numbers"
                    )
                    continue
                own[f"{name}/{key}"] = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        found = {entry: State(tensor=tensor, mean=None) for entry, tensor in own.items()}
        if self.means is not None:
            found = self.means.of_states(own, {name: held.tensor for name, held in self._held.items()})
        states = []
        for entry, state in found.items():
            name, key = entry.rsplit("/", 1)
            held, tensor = self._held[name], state.tensor
            is_split = not held.layout.is_whole and tensor.shape == held.tensor.shape
            layout = held.layout if is_split else Layout(global_shape=tensor.shape)
            states.append(Stored(kind=OPTIMIZER, name=entry, tensor=tensor, layout=layout, mean=state.mean))
            if not (held.layout.is_whole or is_split or tensor.numel() == 1):
                problems.append(
                    f'{kind} keeps "{key}" of shape {list(tensor.shape)} for a part of "{name}" of shape '
                    f"{list(held.tensor.shape)}, which weft cannot put together; use an optimizer whose state "
                    "has one value per element or per tensor, or a plan that does not split parameters "
                    '([data] shard = "nothing", [axes] tensor = 1)'
                )
        return states, problems
