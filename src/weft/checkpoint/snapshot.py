"""The content of a checkpoint at one moment: its files, and the parts of tensors that this rank writes into them.

The files are the same under any plan: tensors in the order of their names, up to 5 GB per file. A snapshot with copies
lets training continue while it is written; without copies it refers to the parameters themselves. Means over replicas
that differ are copies in any case.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.checkpoint.codec_state import CodecState
from weft.checkpoint.files.file_io import Staging, flat_range
from weft.checkpoint.files.hugging_face import WEIGHTS_INDEX, config_files, weights_index
from weft.checkpoint.files.safetensors import MOST_FILE_BYTES, Entry, TensorFile, pack, rank_file
from weft.checkpoint.portable import CODEC, KINDS, MODEL, Part, Portable
from weft.checkpoint.rank_state import take_rank_part
from weft.checkpoint.state import Averaging, TrainerState
from weft.checkpoint.worker_parts import Awaited, awaited
from weft.layout import Runs
from weft.plan.text import format_plan

FORMAT = 2
_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a rank needs to write its part of a checkpoint."""

    files: tuple[TensorFile, ...]
    """Files that all ranks write together."""
    own_files: tuple[TensorFile, ...]
    """The file that this rank writes alone, and those of other replicas in its process; none in an export."""
    parts: Mapping[str, Sequence[Part]]
    """This rank's parts by file name, in the order of their offsets."""
    others: dict[str, bytes]
    """Other files, by name."""
    facts: dict[str, Any] | None
    """The index, except its list of files; none in an export."""
    device: torch.device
    awaited: Awaited | None = None
    """Files of other workers of parameter servers that are to come into it."""


def take(trainer: TrainerState, copies: Staging | None) -> Snapshot:
    """A snapshot of a trainer; collective. If it is copied to `copies`, training may continue at once."""
    world, portable, codecs = trainer.mesh.world, Portable(trainer), CodecState(trainer)
    parts, whole = portable.parts()
    kept, whole[CODEC] = codecs.parts()
    parts += kept
    means = itertools.chain(_means(portable, parts), codecs.means(kept))
    own_files = []
    for one in (trainer, *trainer.others):
        for number in range(max(len(one.sync.all_compressed), 1)):
            file, inside = _rank_part(one, number)
            own_files.append(file)
            parts += inside
    files = {kind: pack(kind, whole[kind], MOST_FILE_BYTES) for kind in KINDS}
    maps = {kind: {entry.name: file.name for file in files[kind] for entry in file.entries} for kind in KINDS}
    return Snapshot(
        files=tuple(file for kind in KINDS for file in files[kind]),
        own_files=tuple(own_files),
        parts=by_file({**files, **{file.name: [file] for file in own_files}}, _settled(parts, means, copies)),
        others=_other_files(trainer, maps[MODEL], whole[MODEL]),
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
            "codec": codecs.facts(),
            "shapes": portable.shapes,
            "tensors": maps,
        },
        device=world.device,
        awaited=awaited(trainer),
    )


def _rank_part(trainer: TrainerState, number: int) -> tuple[TensorFile, list[Part]]:
    """The file that a rank writes alone, and its tensors; `number`: of the data ranks that this process plays."""
    tensors, metadata = take_rank_part(trainer, number)
    file, parts = rank_file(trainer.mesh.world.rank + number), []
    for name, tensor in tensors.items():
        entry, numel = Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)), tensor.numel()
        runs = (Runs(there=0, here=0, numel=numel),) if numel else ()
        parts.append(Part(kind=file, entry=entry, tensor=tensor, span=(0, numel), runs=runs))
    return TensorFile(name=file, entries=tuple(part.entry for part in parts), metadata=metadata), parts


def give_means(trainer: TrainerState) -> None:
    """Take part in the means of a snapshot that another replica of this process takes."""
    portable, codecs = Portable(trainer), CodecState(trainer)
    _give(_means(portable, portable.parts()[0]))
    _give(codecs.means(codecs.parts()[0]))


def give_mean_weights(trainer: TrainerState, average: Averaging | None) -> None:
    """Take part in the means of a snapshot of the weights alone; `average`: that of the replica that takes it."""
    portable = Portable(trainer)
    _give(_means(portable, portable.weight_parts(average)[0]))


def _give(means: Iterator[torch.Tensor]) -> None:
    for _ in means:
        pass


def _means(portable: Portable, parts: Sequence[Part]) -> Iterator[torch.Tensor]:
    """The means over replicas that these parts hold, where replicas differ; what codecs keep is left out."""
    if portable.means is None:
        return iter(())
    portables = [part for part in parts if part.kind != CODEC]
    return portable.means.averaged([(part.tensor, part.mean) for part in portables if part.mean is not None])


def take_weights(trainer: TrainerState, average: Averaging | None) -> Snapshot:
    """A snapshot of the weights alone, or of their average; collective."""
    portable = Portable(trainer)
    parts, whole = portable.weight_parts(average)
    files = pack(MODEL, whole[MODEL], MOST_FILE_BYTES)
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    return Snapshot(
        files=tuple(files),
        own_files=(),
        parts=by_file({MODEL: files}, _settled(parts, _means(portable, parts), None)),
        others=_other_files(trainer, weight_map, whole[MODEL]),
        facts=None,
        device=trainer.mesh.world.device,
    )


def _other_files(trainer: TrainerState, weight_map: dict[str, str], entries: Sequence[Entry]) -> dict[str, bytes]:
    texts = {
        WEIGHTS_INDEX: weights_index(weight_map, sum(entry.num_bytes for entry in entries)),
        **config_files(trainer.named_model),
    }
    return {**{name: text.encode() for name, text in texts.items()}, **trainer.companions}


def _settled(parts: Sequence[Part], means: Iterator[torch.Tensor], copies: Staging | None) -> list[Part]:
    """The parts with values that do not change while they are written: means, and with `copies` all, are copied."""
    averaged = [part for part in parts if part.mean is not None]
    others = [part for part in parts if part.mean is None]
    if copies is None:  # memory for this save only, which is not worth locking pages for
        settled = [*others, *_copied(averaged, means, Staging(torch.device("cpu")))]
    else:
        values = itertools.chain((part.tensor for part in others), means)
        settled = _copied([*others, *averaged], values, copies)
    return [part for part in settled if part.runs]


@torch.no_grad()
def _copied(parts: Sequence[Part], values: Iterable[torch.Tensor], staging: Staging) -> list[Part]:
    """The parts with copies of these values, which overwrite those of the last snapshot."""
    sizes = [(part.span[1] - part.span[0]) * part.tensor.element_size() for part in parts]
    *places, end = itertools.accumulate((-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes), initial=0)
    memory, copies = staging.take(end, torch.uint8), []
    for part, place, size, value in zip(parts, places, sizes, values, strict=True):
        copy = memory[place : place + size].view(part.tensor.dtype)
        copy.copy_(flat_range(value, *part.span), non_blocking=True)
        copies.append(replace(part, tensor=copy, span=(0, copy.numel())))
    if staging.is_pinned:
        torch.cuda.synchronize()
    return copies


def by_file(files: Mapping[str, Sequence[TensorFile]], parts: Sequence[Part]) -> dict[str, list[Part]]:
    """The parts by file name, in the order of their offsets."""
    file_of = {(kind, entry.name): file for kind in files for file in files[kind] for entry in file.entries}
    found: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda part: file_of[part.kind, part.entry.name].starts[part.entry.name]):
        found.setdefault(file_of[part.kind, part.entry.name].name, []).append(part)
    return found
