"""The trainer of one rank of a world that is only imagined: it knows what the rank would hold, and runs nothing.

Cutting, sharing out and laying out were done as for a real run, with meta tensors (`comm/fake_world.py`), so layouts,
stages, groups and the optimizer's pieces are those that the rank would have. Bytes are read off these tensors. What
comes and goes within a step (activations, gathered parameters, gradients on their way) has no tensor here and is not
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from weft.errors import LaunchError, ModelError
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.parallel.zero.grouping import DTYPES
from weft.planning.memory import Memory
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


class MetaTrainer(Trainer):
    """What `parallelize(..., device="meta")` returns."""

    def state_memory(self) -> Memory:
        """The bytes that stay on this rank from step to step, by category."""
        plan, flats = self.plan, self.sync.flats
        counted = _Storages()
        parameters = counted.add([tensor for flat in flats for tensor in (flat.whole, flat.mine)])
        lent = {id(parameter) for flat in flats for parameter in flat.parameters}  # views of those, or not there
        parameters += counted.add(p for p in self.named_model.parameters() if id(p) not in lent)
        master = counted.add(flat.master for flat in flats)
        buffers = counted.add(self.named_model.buffers())
        gradients = sum(map(self._gradient_bytes, flats))
        if not flats:
            gradients = sum(piece.tensor.nbytes for piece in self.sync.pieces)
        moments = _moment_bytes(self.optimizer)
        on_host = plan.data.offload
        # There the optimizer has masters of its own, and is handed gradients.
        own = sum(flat.master.nbytes for flat in flats if flat.kind.trainable)
        return Memory(
            moment="between steps",
            parameters=parameters,
            gradients=gradients,
            master=0 if on_host else master,
            optimizer=0 if on_host else moments,
            buffers=buffers,
            host=2 * own + moments if on_host else 0,
        )

    def _gradient_bytes(self, flat: FlatParameters) -> int:
        """Where gradients add up: whole up to ZeRO-1, this rank's part from ZeRO-2 on."""
        if not flat.kind.trainable:
            return 0
        planned = DTYPES[self.plan.precision.accumulate]
        dtype = torch.promote_types(planned, flat.kind.compute) if planned == torch.float32 else planned
        is_whole = self.plan.data.shard in ("nothing", "optimizer") or flat.flat.num_parts == 1
        return (flat.flat.numel if is_whole else flat.flat.part_numel) * dtype.itemsize

    def step(self, inputs: Any, targets: Any) -> NoReturn:
        self._refuse("step")

    def flush(self) -> NoReturn:
        self._refuse("flush")

    def evaluate(self, batches: Any) -> NoReturn:
        self._refuse("evaluate")

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("generate")

    def whole_output(self, output: Any) -> NoReturn:
        self._refuse("whole_output")

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("save")

    def load(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("load")

    def check_divergence(self) -> NoReturn:
        self._refuse("check_divergence")

    def _refuse(self, called: str) -> NoReturn:
        raise LaunchError(
            f"{called}() needs values and {self.mesh.world.size} ranks, and this is rank {self.mesh.world.rank} of an "
            "imagined world, on the meta device, where nothing can be run; start the ranks with torchrun and leave out "
            'device="meta"'
        )


class _Storages:
    """Bytes behind tensors, each piece of memory once, whoever else shows it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, tensors: Iterable[torch.Tensor]) -> int:
        new = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
        found = sum(num_bytes for address, num_bytes in new.items() if address not in self._seen)
        self._seen |= new.keys()
        return found


def _moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer keeps beside the parameters: it makes that in its first update, which is tried here."""
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
