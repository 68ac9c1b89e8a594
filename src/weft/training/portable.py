"""A trainer's weights and optimizer state as whole tensors under the unsplit model's names, whatever the plan.

Writing, every rank is given the tensors it is to write, whole, while it never holds more of the others' than one flat
buffer. Reading, every rank takes just its own part out of the files.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from weft.comm.objects import gather_values
from weft.errors import CheckpointError
from weft.layout import Layout
from weft.training.buffers import consensus_buffers, persistent_buffers
from weft.training.held import Held, held_parameters, join, whole_tensors
from weft.training.tensor_files import TensorReader

if TYPE_CHECKING:
    from weft.training.trainer import Trainer


class Portable:
    """The portable part of a checkpoint of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        """Collective."""
        self._trainer = trainer
        self._held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
        names = (*self._held, *persistent_buffers(trainer.named_model))
        mine = {name: list(trainer.layouts[name].global_shape) for name in names}
        pipeline = trainer.mesh.group("pipeline", "control")
        stages = gather_values(mine, pipeline, trainer.mesh.world.device)
        self.shapes: dict[str, list[int]] = {}
        """Global shapes of the whole model's parameters and persistent buffers."""
        for shapes in stages:
            self.shapes = {**shapes, **self.shapes}
        self._written_elsewhere = {name for shapes in stages[: pipeline.index] for name in shapes}
        """Held here too, but an earlier stage writes it."""

    def model_sizes(self) -> dict[str, int]:
        """Bytes of each whole tensor of the model that the ranks of this stage write."""
        sizes = {name: _global_bytes(held, held.tensor) for name, held in self._held.items()}
        for name, buffer in persistent_buffers(self._trainer.named_model).items():
            sizes[name] = math.prod(self._trainer.layouts[name].global_shape) * buffer.element_size()
        return {name: size for name, size in sizes.items() if name not in self._written_elsewhere}

    def model_tensors(self, wanted: set[str]) -> dict[str, torch.Tensor]:
        """Those tensors of the model that are wanted here; collective."""
        buffers = consensus_buffers(self._trainer.named_model, self._trainer.mesh)
        mesh, layouts = self._trainer.mesh, self._trainer.layouts
        tensors = _keep(whole_tensors(self._held, mesh, lambda name, held: held.tensor), wanted)
        whole = ((name, join(buffer, layouts[name], mesh)) for name, buffer in buffers.items())
        return tensors | {name: buffer for name, buffer in whole if name in wanted}

    def optimizer_sizes(self) -> dict[str, int]:
        """Bytes of each whole tensor of the optimizer's state, as "<parameter>/<state>"."""
        return {
            f"{name}/{key}": _global_bytes(self._held[name], value) if self._is_split(name, value) else value.nbytes
            for name, key, value in self._states()
            if name not in self._written_elsewhere
        }

    def optimizer_tensors(self, wanted: set[str]) -> dict[str, torch.Tensor]:
        """Those tensors of the optimizer's state that are wanted here; collective."""
        tensors: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, torch.Tensor]] = {}
        for name, key, value in self._states():
            if self._is_split(name, value):
                states.setdefault(key, {})[name] = value
            elif f"{name}/{key}" in wanted:
                tensors[f"{name}/{key}"] = value
        for key, parts in sorted(states.items()):
            gathered = whole_tensors(self._held, self._trainer.mesh, lambda name, held, parts=parts: parts.get(name))  # type: ignore[misc]
            tensors |= _keep(((f"{name}/{key}", whole) for name, whole in gathered), wanted)
        return tensors

    @torch.no_grad()
    def load_model(self, reader: TensorReader) -> None:
        """Take this rank's part of the model out of a checkpoint's files; collective."""
        for name, held in self._held.items():
            held.tensor.copy_(self._read(reader, name, held.layout))
        for name, buffer in persistent_buffers(self._trainer.named_model).items():
            buffer.copy_(self._read(reader, name, self._trainer.layouts[name]))
        self._trainer.sync.publish()

    def load_optimizer(self, reader: TensorReader, entries: list[str]) -> None:
        """Through the optimizer's own `load_state_dict`, which knows where each of its states must live."""
        optimizer = self._trainer.optimizer
        keys: dict[str, list[str]] = {}
        for entry in entries:
            name, key = entry.rsplit("/", 1)
            if name in self._held:
                keys.setdefault(name, []).append(key)
        # Of a 0-d parameter every state is 0-d; what other parameters keep says which are one number a tensor.
        per_tensor = {"step"} | {
            key
            for name, inside in keys.items()
            if self._held[name].layout.global_shape
            for key in inside
            if not reader.shape(f"{name}/{key}")
        }
        name_of = {id(piece.tensor): piece.name for piece in self._trainer.sync.pieces}
        state, number = {}, 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = name_of[id(parameter)]
                if name in keys:
                    # Copied: what is read is a window on the file, which may soon be deleted.
                    state[number] = {
                        key: (
                            reader.read(f"{name}/{key}")
                            if key in per_tensor
                            else self._read(reader, f"{name}/{key}", self._held[name].layout)
                        ).clone()
                        for key in keys[name]
                    }
                number += 1
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def _read(self, reader: TensorReader, entry: str, layout: Layout) -> torch.Tensor:
        """This rank's part of a tensor in the files; whole where its shape says that it is no element's business."""
        mesh = self._trainer.mesh
        if layout.is_whole or reader.shape(entry) != layout.global_shape:
            return reader.read(entry)
        if not layout.splits:
            assert layout.flat_range is not None
            return reader.read_range(entry, *layout.flat_range)
        sizes, coordinates = mesh.grid.axes.sizes, mesh.grid.coordinates(mesh.world.rank)
        boxes = [(reader.read(entry, there), here) for there, here in layout.windows(sizes, coordinates)]
        part = boxes[0][0].new_empty(layout.local_shape(sizes, coordinates))
        for box, here in boxes:
            part[here] = box
        return part if layout.flat_range is None else part.flatten()[slice(*layout.flat_range)]

    def _states(self) -> list[tuple[str, str, torch.Tensor]]:
        """(parameter, state, this rank's tensor) of all the optimizer keeps."""
        states = []
        for name, held in self._held.items():
            kept = self._trainer.optimizer.state.get(held.piece, {}) if held.piece is not None else {}
            for key, value in kept.items():
                if not isinstance(value, torch.Tensor | int | float):
                    kind = type(self._trainer.optimizer).__name__
                    raise CheckpointError(
                        f'{kind} keeps a {type(value).__name__} "{key}" for "{name}", which weft cannot save; '
                        "use an optimizer whose state is tensors and numbers"
                    )
                states.append((name, key, torch.as_tensor(value)))
        return states

    def _is_split(self, name: str, value: torch.Tensor) -> bool:
        """Whether a state has one value an element, and so is shared out as the parameter is."""
        return not self._held[name].layout.is_whole and value.shape == self._held[name].tensor.shape


def _global_bytes(held: Held, part: torch.Tensor) -> int:
    return math.prod(held.layout.global_shape) * part.element_size()


def _keep(tensors: object, wanted: set[str]) -> dict[str, torch.Tensor]:
    """All are looked at, since making them is collective; only what is wanted is copied."""
    return {name: tensor.clone() for name, tensor in tensors if name in wanted}  # type: ignore[attr-defined]
