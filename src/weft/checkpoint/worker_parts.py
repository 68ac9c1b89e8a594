"""What every worker of parameter servers keeps by itself, in the checkpoint that the first one writes.

    the first worker    writes all; what its codecs keep is in its ranks' own files
    any other           writes what its codecs keep beside the checkpoint, in `.step-100.workers/`
    the first worker    waits for these files, a while, moves them into the checkpoint, and publishes it

So it is whole by itself, and workers need not talk to each other. Where they end their steps together, all save at the
same step. Where they do not (asynchronous modes, backups) nobody else knows of which step a checkpoint is, and there is
the first worker's alone. Others, and those whose files do not come in time, begin with nothing kept when a run is
resumed: what they had not sent of gradients is lost then, as that of a worker which dies always is.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.files.file_io import bytes_of, force_to_disk, write_at
from weft.checkpoint.files.safetensors import Entry, TensorFile, TensorReader
from weft.checkpoint.state import TrainerState
from weft.sync.served import ServedSync

log = logging.getLogger("weft")
PATIENCE_S = 30.0
"""How long the first worker waits for the others' files: a file system that hosts share may show them late."""
_LOOK_S = 0.02
_CODECS = "worker/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Files of other workers that are to come into a checkpoint."""

    names: tuple[str, ...]
    mark: str
    """What they say of themselves: the run and the step."""


def worker_file(worker: int, place: int) -> str:
    """The name of the file of a rank of a worker."""
    return f"worker-{worker:05d}-{place:05d}.safetensors"


def take_codecs(trainer: TrainerState) -> dict[str, torch.Tensor]:
    """What this rank's codecs keep, not copied."""
    if not isinstance(trainer.sync, ServedSync):
        return {}
    return {f"{_CODECS}{name}": one for name, one in trainer.sync.kept.tensors().items()}


def take_values(trainer: TrainerState) -> dict[str, Any]:
    """Plain values that belong to it."""
    return trainer.sync.kept.values() if isinstance(trainer.sync, ServedSync) else {}


def load_worker_part(trainer: TrainerState, directory: Path, reader: TensorReader, values: Mapping[str, Any]) -> None:
    """Go on with what this worker's codecs kept. `reader`: of the file of the first worker's rank, whose values these
    are."""
    sync, world = trainer.sync, trainer.mesh.world
    if not isinstance(sync, ServedSync) or not values.get("worker"):
        return
    worker = trainer.mesh.ranks_before // world.size
    if not worker:
        _give(sync, reader, values)
    elif (directory / (name := worker_file(worker, world.rank))).exists():
        with TensorReader(directory, [name], world.device) as own:
            values = json.loads(own.metadata[name]["values"])
            _give(sync, own, values)
    else:
        log.warning(
            "%s has nothing of what the codecs of worker %d had not sent: they begin with nothing", directory, worker
        )
        return
    trainer.counts.shared, trainer.counts.is_own = values["shared_count"], values["has_own_count"]


def _give(sync: ServedSync, reader: TensorReader, values: Mapping[str, Any]) -> None:
    names = [name for name in reader.entries if name.startswith(_CODECS)]
    sync.kept.load({name.removeprefix(_CODECS): reader.read_whole(name) for name in names}, values["worker"])


def awaited(trainer: TrainerState) -> Awaited | None:
    """What the first worker has to wait for; None where it is alone with what it keeps."""
    sync, num_ranks = trainer.sync, trainer.mesh.world.size
    if not isinstance(sync, ServedSync) or not sync.kept.come_together or not sync.kept.values():
        return None
    workers = range(1, sync.take_part().num_workers)
    names = tuple(worker_file(worker, place) for worker in workers for place in range(num_ranks))
    return Awaited(names=names, mark=_mark(trainer, sync)) if names else None


def save_worker_part(trainer: TrainerState, directory: Path) -> None:
    """Write what this worker's codecs keep, for the first one to take into its checkpoint."""
    sync = trainer.sync
    if not isinstance(sync, ServedSync) or not sync.kept.come_together or not sync.kept.values():
        return
    shared = None if trainer.counts.shared is None else float(trainer.counts.shared)
    values = {"worker": sync.kept.values(), "shared_count": shared, "has_own_count": trainer.counts.is_own}
    tensors = take_codecs(trainer)
    name = worker_file(sync.take_part().index, trainer.mesh.world.rank)
    entries = [Entry(name=one, dtype=tensor.dtype, shape=tuple(tensor.shape)) for one, tensor in tensors.items()]
    metadata = {"values": json.dumps(values), "mark": _mark(trainer, sync)}
    file, folder = TensorFile(name=f".{name}", entries=entries, metadata=metadata), _beside(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.name).unlink(missing_ok=True)
        file.create(folder)
        with (folder / file.name).open("r+b", buffering=0) as written:
            for one, tensor in tensors.items():
                write_at(written.fileno(), bytes_of(tensor.cpu().contiguous()), file.starts[one])
            os.fsync(written.fileno())
        (folder / file.name).rename(folder / name)
        force_to_disk(folder)
    except OSError as error:  # the first worker says what is missing
        log.warning("%s cannot be written: %s", error.filename or folder / name, error.strerror or error)


def collect(expected: Awaited, partial: Path, directory: Path) -> list[tuple[str, int]]:
    """Move the files of other workers into a checkpoint that is being written; returns their names and sizes."""
    folder, until_s, found = _beside(directory), time.monotonic() + PATIENCE_S, []
    missing = list(expected.names)
    while missing:
        for name in list(missing):
            if _mark_of(folder, name) == expected.mark:
                (folder / name).rename(partial / name)
                found.append((name, (partial / name).stat().st_size))
                missing.remove(name)
        if missing and time.monotonic() >= until_s:
            log.warning(
                "%s will lack what %d of %d ranks of other workers had not sent of their gradients (waited %g s for "
                "%s): they are gone, or write to another file system",
                directory,
                len(missing),
                len(expected.names),
                PATIENCE_S,
                folder / missing[0],
            )
            break
        if missing:
            time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _mark(trainer: TrainerState, sync: ServedSync) -> str:
    return f"{sync.kept.job}/{trainer.steps_done}"


def _mark_of(folder: Path, name: str) -> str | None:
    """Of a file that is there, which may be of an earlier run that was killed."""
    if not (folder / name).exists():
        return None
    with TensorReader(folder, [name], torch.device("cpu")) as reader:
        return reader.metadata[name].get("mark")


def _beside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.workers")
