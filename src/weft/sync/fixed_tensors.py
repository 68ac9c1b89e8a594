"""What a worker of servers has and does not train: frozen parameters and all buffers, as bytes under names.

A worker that joins takes the values of the first one, whatever it began from: another seed, or a checkpoint that only
the first one has loaded. Buffers that are not saved (tables that a model computes) are among them: a model may draw
them, and other plans give all ranks the first one's, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.plan.partition.server_shards import ServedTensor
from weft.server.protocol.frames import frame_of
from weft.server.protocol.message import Buffer
from weft.sync.base import Sync


def fixed_tensors(model: nn.Module, sync: Sync) -> dict[str, torch.Tensor]:
    """This rank's part of all that is not trained, by name, where its values are kept: the flat buffer, or the model's
    own tensor."""
    trained = {piece.name for piece in sync.pieces}
    found = {name: one.detach() for name, one in model.named_parameters() if name not in trained}
    for flat in sync.flats:
        held = zip(flat.names, flat.kept_views(flat.master), strict=True)
        found |= {name: one for name, one in held if name in found}
    return found | dict(model.named_buffers())


class FixedTensors:
    """The tensors of one rank, as servers know them."""

    def __init__(self, tensors: dict[str, torch.Tensor], places: dict[str, Any] | None = None) -> None:
        """By the names that they have on servers (`served_tensors.name_of`). `places`: of those in checkpoints."""
        self.tensors, self.places = tensors, places or {}
        self._arriving: dict[str, tuple[torch.Tensor, int]] = {}
        """What has come of tensors that do not lie in one piece in host memory, and how many elements are missing."""

    def rows(self) -> list[tuple[int, int, str, str]]:
        """Of each: elements, bytes of one, dtype, name."""
        return [
            (one.numel(), one.element_size(), str(one.dtype).removeprefix("torch."), name)
            for name, one in self.tensors.items()
        ]

    def frame(self, name: str, start: int, stop: int) -> Buffer:
        """The bytes of elements of a flattened tensor, in memory of their own."""
        values = self.tensors[name].detach().reshape(-1)[start:stop].cpu().clone()
        return frame_of(values.view(torch.uint8))

    @torch.no_grad()
    def write(self, name: str, start: int, stop: int, frame: Buffer) -> None:
        """Take elements of it."""
        values = torch.frombuffer(bytearray(frame), dtype=self.tensors[name].dtype)
        tensor = self.tensors[name]
        if tensor.is_contiguous():
            tensor.view(-1)[start:stop].copy_(values)
            return
        flat, missing = self._arriving.get(name, (torch.empty(tensor.numel(), dtype=tensor.dtype), tensor.numel()))
        flat[start:stop] = values
        self._arriving[name] = flat, missing - (stop - start)
        if missing == stop - start:
            del self._arriving[name]
            _copy(tensor, flat.view(tensor.shape))


def _copy(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write a tensor of which several elements may be one in memory (`expand`)."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def fixed_of_all(ranks: list[list[tuple[int, int, str, str]]]) -> tuple[tuple[ServedTensor, ...], tuple[str, ...]]:
    """What all ranks of a worker have together, from what each has, and the dtypes."""
    found: dict[str, ServedTensor] = {}
    dtypes: dict[str, str] = {}
    for rank, rows in enumerate(ranks):
        for numel, item_bytes, dtype, name in rows:
            holders = found[name].holders if name in found else ()
            found[name] = ServedTensor(name=name, numel=numel, item_bytes=item_bytes, holders=(*holders, rank))
            dtypes[name] = dtype
    return tuple(found.values()), tuple(dtypes[name] for name in found)
