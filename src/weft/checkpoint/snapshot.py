"""What a checkpoint is to hold, taken at one moment: which files there are, and what this rank writes into them where.

Files are the same under any plan: tensors in the order of their names, a few gigabytes a file. Taken with a copy,
training may go on while it is written; without, the parameters themselves are what is written, and nothing is copied.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.checkpoint.file_io import flat_range
from weft.checkpoint.hugging_face import WEIGHTS_INDEX, config_files, weights_index
from weft.checkpoint.portable import KINDS, MODEL, Portable
from weft.checkpoint.rank_state import rank_file, take_rank_part
from weft.checkpoint.safetensors import MOST_FILE_BYTES, Entry, TensorFile, pack
from weft.checkpoint.state import TrainerState
from weft.layout import Range, Runs
from weft.plan.text import format_plan

_ALIGNED_BYTES = 64


class HostCopies:
    """A buffer that holds copies of one list of tensors at a time."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def hold(self, parts: Sequence[tuple[torch.Tensor, Range]]) -> list[torch.Tensor]:
        """Copies of ranges of flattened tensors, as they are now. The last ones are overwritten."""
        sizes = [(stop - start) * tensor.element_size() for tensor, (start, stop) in parts]
        *places, end = itertools.accumulate((-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes), initial=0)
        if self._memory.numel() < end:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=self._is_on_gpu)
        copies = []
        for (tensor, span), place, size in zip(parts, places, sizes, strict=True):
            copy = self._memory[place : place + size].view(tensor.dtype)
            copies.append(copy.copy_(flat_range(tensor, *span), non_blocking=True))
        if self._is_on_gpu:
            torch.cuda.synchronize()
        return copies


FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Something this rank writes: some elements of a tensor, and where they belong."""

    file: str
    start_byte: int
    """Of the whole tensor in the file."""
    tensor: torch.Tensor
    span: Range
    """The elements of it, flattened."""
    runs: tuple[Runs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a rank must know to write its part of a checkpoint, as it was when the save was asked for."""

    files: tuple[TensorFile, ...]
    """Those that all ranks write together."""
    own_file: TensorFile
    stretches: tuple[Stretch, ...]
    texts: dict[str, str]
    """Other files, by name."""
    facts: dict[str, Any]
    """What the index says besides the files."""
    device: torch.device


def take(trainer: TrainerState, copies: HostCopies | None) -> Snapshot:
    """What a checkpoint is to hold; collective. With `copies`, training may go on and change everything."""
    world, portable = trainer.mesh.world, Portable(trainer)
    parts, whole = portable.parts()
    kinds = {kind: pack(kind, whole[kind], MOST_FILE_BYTES) for kind in KINDS}
    file_of = {(kind, entry.name): file for kind in KINDS for file in kinds[kind] for entry in file.entries}
    tensors, metadata = take_rank_part(trainer)
    entries = [Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
    own_file = TensorFile(name=rank_file(world.rank), entries=tuple(entries), metadata=metadata)
    chosen = [
        (file_of[part.kind, part.entry.name], part.entry.name, part.tensor, part.span, part.runs) for part in parts
    ]
    for name, tensor in tensors.items():
        runs = (Runs(there=0, here=0, numel=tensor.numel()),) if tensor.numel() else ()
        chosen.append((own_file, name, tensor, (0, tensor.numel()), runs))
    held = [(tensor, span) for _, _, tensor, span, _ in chosen]
    if copies is not None:
        held = [(copy, (0, copy.numel())) for copy in copies.hold(held)]
    maps = {kind: {entry.name: file.name for file in kinds[kind] for entry in file.entries} for kind in KINDS}
    model_bytes = sum(entry.num_bytes for entry in whole[MODEL])
    return Snapshot(
        files=tuple(file for kind in KINDS for file in kinds[kind]),
        own_file=own_file,
        stretches=tuple(
            Stretch(file=file.name, start_byte=file.starts[name], tensor=tensor, span=span, runs=runs)
            for (file, name, _, _, runs), (tensor, span) in zip(chosen, held, strict=True)
        ),
        texts={WEIGHTS_INDEX: weights_index(maps[MODEL], model_bytes), **config_files(trainer.named_model)},
        facts={
            "format": FORMAT,
            "step": trainer.steps_done,
            "data_position": trainer.data_position,
            "seed": zlib.crc32(bytes(torch.get_rng_state().tolist())),
            "dropout_seed": trainer.seeds.base,
            "plan": format_plan(trainer.plan),
            "optimizer": type(trainer.optimizer).__name__,
            "optimizer_numbers": portable.optimizer_numbers(),
            "update": trainer.update.state(),
            "shapes": portable.shapes,
            "tensors": maps,
        },
        device=world.device,
    )
