"""What a checkpoint holds of replicas that differ between exchanges (`[data] sync = "local"`).

    portable part      the mean over replicas: of weights and running statistics, unless they agree at that moment, and
                       of the optimizer's state, which is always each replica's own
    plan-bound part    each replica's own weights and optimizer state, and what its next exchange starts from

Only another plan uses the mean of optimizer states, which is an approximation: a mean of moments is not the moment of
anything. Means are taken of copies, a bucket at a time, and go to host memory: a rank keeps what it writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.checkpoint.files.safetensors import TensorReader
from weft.checkpoint.state import TrainerState
from weft.layout import Runs
from weft.parallel.state.batchnorm import running_statistics
from weft.sync.local import LocalSync

_WEIGHT, _REPLICA, _OPTIMIZER = "weight/", "replica/", "optimizer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """How a replica's tensor enters the mean over replicas."""

    factor: float = 1.0
    """What it is multiplied by: more than 1 where other replicas do not have this tensor, and 0 if this one has not."""
    is_rounded: bool = False
    """The mean is a whole number: a count of steps, or integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One entry of the optimizer's state of one parameter, and how replicas average it."""

    tensor: torch.Tensor
    mean: Mean | None


class ReplicaMeans:
    """The means over the replicas of one trainer, where there are several that differ."""

    def __init__(self, trainer: TrainerState, sync: LocalSync) -> None:
        self._sync, self._mesh = sync, trainer.mesh
        self._statistics = {id(one) for one in running_statistics(trainer.named_model)}
        self.of_weight = None if sync.agrees else Mean()
        """How trained parameters enter the mean; None if replicas agree."""

    def of_buffer(self, buffer: torch.Tensor) -> Mean | None:
        """How a buffer of the model enters the mean; None if it is the same on all replicas, or has no mean."""
        if self._mesh.plan.data.buffers == "local":
            return Mean() if buffer.is_floating_point() else None
        return Mean() if id(buffer) in self._statistics and not self._sync.agrees else None

    def of_states(self, own: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> dict[str, State]:
        """Every replica's states, by "PARAMETER/KEY"; collective. `parameters`: this rank's parts of them.

        A replica may lack some that others have: it has made no update yet, or its samples used other parameters.
        """
        mine = {name: _description(tensor) for name, tensor in own.items()}
        tables: list[dict[str, Any]] = self._sync.gather(mine, self._mesh.between_replicas("control"))
        found = {}
        for name in sorted({name for table in tables for name in table}):
            holders = [replica for replica, table in enumerate(tables) if name in table]
            shape, dtype, _ = tables[holders[0]][name]
            tensor = own.get(name)
            if tensor is None:
                device = parameters[name.rsplit("/", 1)[0]].device
                tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            is_counted = all(tables[replica][name][2] for replica in holders)
            is_float = tensor.is_floating_point()
            chosen = holders if is_float else holders[:1]  # integers may be codes, which have no mean
            factor = len(tables) / len(chosen) if self._mesh.replica in chosen else 0.0
            found[name] = State(tensor=tensor, mean=Mean(factor=factor, is_rounded=is_counted or not is_float))
        return found

    def averaged(self, tensors: Sequence[tuple[torch.Tensor, Mean]]) -> Iterator[torch.Tensor]:
        """The means of tensors, in their order; collective, and alike on all replicas."""
        mesh = self._mesh
        return averaged(tensors, self._sync.mean_, device=mesh.world.device, bucket_bytes=mesh.plan.comm.bucket_bytes)


@torch.no_grad()
def averaged(
    tensors: Sequence[tuple[torch.Tensor, Mean]],
    mean_: Callable[[Sequence[torch.Tensor]], None],
    *,
    device: torch.device,
    bucket_bytes: int,
) -> Iterator[torch.Tensor]:
    """The means of tensors over replicas, in their order, of copies on a device, a bucket at a time. `mean_` replaces
    tensors by their means over replicas; collective, and alike on all of them."""
    bucket: list[tuple[torch.Tensor, Mean]] = []
    num_bytes = 0
    for one in tensors:
        if bucket and num_bytes + one[0].nbytes > bucket_bytes:
            yield from _average_bucket(bucket, mean_, device)
            bucket, num_bytes = [], 0
        bucket.append(one)
        num_bytes += one[0].nbytes
    yield from _average_bucket(bucket, mean_, device)


def _average_bucket(
    bucket: Sequence[tuple[torch.Tensor, Mean]], mean_: Callable[[Sequence[torch.Tensor]], None], device: torch.device
) -> Iterator[torch.Tensor]:
    copies = []
    for tensor, mean in bucket:
        dtype = tensor.dtype if tensor.is_floating_point() else torch.float64
        copy = tensor.detach().to(device, dtype, copy=True)
        copies.append(copy if mean.factor == 1.0 else copy.mul_(mean.factor))
    mean_(copies)
    for copy, (tensor, mean) in zip(copies, bucket, strict=True):
        yield (copy.round_() if mean.is_rounded else copy).to(tensor.dtype)


def replica_means(trainer: TrainerState) -> ReplicaMeans | None:
    """The means that a checkpoint of this trainer holds; None if its replicas never differ."""
    sync = trainer.sync
    return ReplicaMeans(trainer, sync) if isinstance(sync, LocalSync) and sync.num_replicas > 1 else None


def _description(tensor: torch.Tensor) -> list[Any]:
    """Shape, dtype, and whether it is one number that counts something."""
    is_counted = tensor.numel() == 1 and tensor.is_floating_point() and float(tensor).is_integer()
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), is_counted]


def counted_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """The numbers that an optimizer counts in each of its parameter groups: those that are no arguments of its
    constructor, and hence not settings of the user."""
    made_with = {"lr", "initial_lr"}
    for kind in type(optimizer).__mro__:
        if "__init__" in vars(kind):
            made_with |= set(inspect.signature(vars(kind)["__init__"]).parameters)
    return [
        {key: value for key, value in group.items() if key not in made_with and type(value) in (int, float)}
        for group in optimizer.param_groups
    ]


def take_own(trainer: TrainerState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What this rank's replica has of its own, for an exact continuation: tensors (not copied) and plain values;
    collective."""
    sync = trainer.sync
    if not isinstance(sync, LocalSync):
        return {}, {}
    sync.drain()
    in_portable = sync.agrees or sync.num_replicas == 1  # weights that all replicas have are there, to the bit
    tensors = {
        f"{_REPLICA}{name}": tensor
        for name, tensor in sync.own_tensors().items()
        if not (in_portable and name.startswith(_WEIGHT))
    }
    if sync.num_replicas == 1:
        return tensors, {}
    numbers: dict[str, float] = {}
    for piece in sync.pieces:
        for key, value in trainer.optimizer.state.get(piece.tensor, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{_OPTIMIZER}{piece.name}/{key}"] = value
            else:
                numbers[f"{piece.name}/{key}"] = value
    groups = counted_numbers(trainer.optimizer)
    return tensors, {"update": trainer.update.state(), "numbers": numbers, "groups": groups}


@torch.no_grad()
def load_own(trainer: TrainerState, reader: TensorReader, values: dict[str, Any]) -> None:
    """Restore what `take_own` took, after the portable part: tensors are read into those that are there."""
    sync = trainer.sync
    if not isinstance(sync, LocalSync):
        return
    for name, tensor in sync.own_tensors().items():
        if f"{_REPLICA}{name}" in reader.entries:
            _read(reader, f"{_REPLICA}{name}", tensor)
    if not values:
        return
    for piece in sync.pieces:
        state = trainer.optimizer.state.get(piece.tensor, {})
        for key in list(state):
            name = f"{piece.name}/{key}"
            if name in values["numbers"]:
                state[key] = values["numbers"][name]
            elif f"{_OPTIMIZER}{name}" in reader.entries:
                _read(reader, f"{_OPTIMIZER}{name}", state[key])
            else:  # only other replicas have it
                del state[key]
        if not state:
            trainer.optimizer.state.pop(piece.tensor, None)
    for group, counted in zip(trainer.optimizer.param_groups, values["groups"], strict=True):
        group.update(counted)
    trainer.update.load_state(values["update"])


def _read(reader: TensorReader, entry: str, tensor: torch.Tensor) -> None:
    numel = tensor.numel()
    reader.read(entry, tensor, [Runs(there=0, here=0, numel=numel)] if numel else [])
