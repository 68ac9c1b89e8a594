"""One rank of a fake world, as `parallelize(..., device="meta")` returns it: what the rank would hold; nothing runs.

Cutting, sharding and laying out were done as for a real run, with meta tensors (`comm/world/fake_world.py`), so
layouts, stages, groups and the optimizer's pieces are those that the rank would have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import nn

from weft.errors import LaunchError, ModelError
from weft.parallel.zero.grouping import describe_parameters
from weft.plan.partition.flat_buffers import own_tensor
from weft.planning.memory import Memory, state_memory
from weft.training.describe import describe
from weft.training.step.parallel_model import ParallelModel
from weft.training.trainer import Trainer


def refuse_memory(model: nn.Module) -> None:
    """A model of which some tensors have values would be cut in two ways."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    filled = [name for name, tensor in tensors.items() if not tensor.is_meta]
    if filled:
        raise ModelError(
            f'{len(filled)} of {len(tensors)} parameters and buffers have memory ("{filled[0]}" first), and '
            'device="meta" is for looking at models without any; build the model under torch.device("meta")'
        )


@dataclass(frozen=True, slots=True)
class MetaTrainer:
    """A rank's parts of a model and its training state, without memory. Methods of `Trainer` that run are refused."""

    parts: ParallelModel
    """Its attributes (model, mesh, layouts, sync, ...) and the mesh's (plan, data_rank, ...) are also this record's."""
    optimizer: torch.optim.Optimizer

    steps_done = data_position = 0

    @property
    def named_model(self) -> nn.Module:
        return self.parts.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.parts.mesh.close()

    def describe(self) -> str:
        return describe(self.parts, self.parts.make_replacements())

    def state_memory(self) -> Memory:
        """The bytes that stay on this rank from step to step, by category.

        Activations, gathered parameters and gradients on their way live within a step, and are not counted.
        """
        model, plan = self.parts.model, self.parts.mesh.plan
        flats = [flat.buffer for flat in self.parts.sync.flats]
        names = {name for flat in flats for name in flat.names}
        own = [own_tensor(one, plan) for one in describe_parameters(model) if one.name not in names]
        return state_memory(
            plan,
            [*own, *flats],
            in_flats=bool(flats),
            device="meta",
            optimizer_bytes=_moment_bytes(self.optimizer),
            buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        )

    def __getattr__(self, name: str) -> Any:
        for owner in (self.parts, self.parts.mesh):
            if hasattr(owner, name):
                return getattr(owner, name)
        if not callable(getattr(Trainer, name, None)):
            raise AttributeError(f"a rank of a fake world has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            world = self.parts.mesh.world
            raise LaunchError(
                f"{name}() needs values and {world.size} ranks, and this is rank {world.rank} of a fake world, on the "
                "meta device, where nothing can be run; start the ranks with torchrun and leave out "
                'device="meta"'
            )

        return refuse


def _moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an optimizer keeps beside the parameters: it makes them in its first update, which is tried here."""
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    for piece in pieces:
        piece.grad = torch.empty_like(piece)
    step: Callable[[], object] = optimizer.step
    step()
    for piece in pieces:
        piece.grad = None
    kept = [value for state in optimizer.state.values() for value in state.values()]
    optimizer.state.clear()
    return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor) and value.is_meta)
