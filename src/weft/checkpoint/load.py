"""Loading a checkpoint under any plan; docs/checkpoints.md lists its files, which `save.py` writes.

Loading checks every file's checksums (once, the pieces divided among the
ranks) before it changes anything; then every rank reads only its own parts. The same plan continues to the bit; another
plan uses the portable part and logs a warning.

Hyperparameters (learning rate, decay) are the run's, not the checkpoint's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.codec_state import has_other_hosts, load_portable_codecs
from weft.checkpoint.extra_state import load_extra, read_extra, refuse_other_names
from weft.checkpoint.files.agree import try_on_files
from weft.checkpoint.files.checksums import FileRecord, find_damage
from weft.checkpoint.files.hugging_face import companion_files
from weft.checkpoint.files.safetensors import TensorReader, rank_file
from weft.checkpoint.folders import INDEX, restore
from weft.checkpoint.portable import AVERAGE, MODEL, OPTIMIZER, Portable
from weft.checkpoint.rank_state import load_rank_part
from weft.checkpoint.save import index_checksum
from weft.checkpoint.snapshot import FORMAT
from weft.checkpoint.state import TrainerState
from weft.comm.objects import gather_values
from weft.errors import CheckpointError, DamagedCheckpointError
from weft.mesh import Mesh
from weft.plan.late_merges import exchanges_after
from weft.plan.plan import Plan
from weft.plan.text import format_plan
from weft.sync.local import LocalSync

_MOST_SHOWN = 8

log = logging.getLogger("weft")


def load(trainer: TrainerState, directory: Path, *, extra_state: bool = True) -> None:
    """Restore a trainer from a checkpoint; collective. Nothing changes unless the checkpoint is complete.

    Without `extra_state`, the state of the user's own stays as it is.
    """
    world, portable = trainer.mesh.world, Portable(trainer)
    everyone = trainer.mesh.everyone("control")
    index: dict[str, Any] = {}
    extra: dict[str, Any] = {}

    def look() -> int:
        index.update(read_index(directory))
        _refuse_other_model(trainer, portable, index, directory)
        return int(index["crc32"])

    def read_beside() -> None:
        if extra_state:
            extra.update(read_extra(directory, rank_file(0)))
            refuse_other_names(trainer.extra_state, extra, directory)
        if world.rank == 0:
            trainer.companions = {**companion_files(directory), **trainer.companions}

    def read() -> None:
        names = sorted({name for kind in (MODEL, OPTIMIZER) for name in index["tensors"][kind].values()})
        with TensorReader(directory, names, world.device) as reader:
            portable.read_model(reader)
            portable.load_optimizer(reader, index["tensors"][OPTIMIZER], index["optimizer_numbers"])
        if trainer.average is not None and averages:
            with TensorReader(directory, sorted(set(averages.values())), world.device) as reader:
                portable.read_average(reader)

    try_on_files(everyone, "restore", directory, lambda: restore(directory) if world.rank == 0 else None)
    if len(set(try_on_files(everyone, "read", directory, look))) > 1:
        raise CheckpointError(
            f"{directory} is not the same checkpoint on all ranks; give one in a folder that all hosts share"
        )
    require_undamaged(directory, index, trainer.mesh)
    if isinstance(trainer.sync, LocalSync):
        trainer.sync.drain()  # collective, so before anything that may fail on one rank alone
    averages: dict[str, str] = index["tensors"].get(AVERAGE, {})
    try_on_files(everyone, "read", directory, read_beside)
    try_on_files(everyone, "read", directory, read)
    if trainer.average is not None:
        trainer.average.has_begun = bool(averages)
    _warn_of_averages(trainer, index, directory, has_average=bool(averages))
    try_on_files(everyone, "load the extra state of", directory, lambda: load_extra(trainer.extra_state, extra))
    trainer.sync.publish()
    trainer.steps_done = index["step"]
    trainer.data_position = index["data_position"]
    trainer.seeds.base = index["dropout_seed"]
    trainer.update.load_state(index["update"])
    moved = has_other_hosts(trainer, index)
    if index["plan"] == format_plan(trainer.plan) and not moved:
        trainer.sync.settle()  # replicas may have weights of their own, which are read over these
        try_on_files(everyone, "read", directory, lambda: load_rank_part(trainer, directory))
        if trainer.mesh.ranks_before:  # what was written is of the first worker
            torch.manual_seed(index["seed"] + trainer.mesh.ranks_before + world.rank)
        if not trainer.sync.agrees:  # this replica has read weights of its own
            trainer.sync.publish()
        return
    trainer.sync.restart(steps_done=trainer.steps_done)
    goes_on = load_portable_codecs(trainer, directory, index)
    if trainer.pipeline_step is not None:
        trainer.pipeline_step.load_state({}, {})
    trainer.balance.load_state({})
    torch.manual_seed(index["seed"] + trainer.mesh.ranks_before + world.rank)
    if world.rank == 0:
        log.warning("%s was written under another plan%s: weights, optimizer and data position are used, to "
                    "rounding%s; random states and exchange states start anew", directory,
                    ", or with ranks on other hosts" if moved else "",
                    ", and what its codec had not sent yet" if goes_on else "")  # fmt: skip


def _warn_of_averages(trainer: TrainerState, index: dict[str, Any], directory: Path, *, has_average: bool) -> None:
    """Say where a checkpoint and a plan do not agree on whether there is an average."""
    if trainer.mesh.world.rank != 0:
        return
    if has_average and trainer.average is None:
        log.warning("%s holds an average of the weights, and the plan keeps none: it is not continued", directory)
    elif trainer.average is not None and not has_average and _has_average_begun(trainer.plan, index["step"]):
        log.warning("%s holds no average of the weights: the average begins anew, with the weights of step %d",
                    directory, index["step"])  # fmt: skip


def _has_average_begun(plan: Plan, step: int) -> bool:
    """True if an average of the weights begins within so many steps: with weights that all replicas have."""
    return any(start == 0 or exchanges_after(plan.data, start) for start in range(plan.average.start, step))


def read_index(directory: Path) -> dict[str, Any]:
    """The content of a checkpoint's index."""
    try:
        index: dict[str, Any] = json.loads((directory / INDEX).read_text())
    except OSError as error:
        raise CheckpointError(f"{directory} is not a checkpoint: {INDEX} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{directory / INDEX} is damaged: {error}") from error
    if not isinstance(index, dict) or index_checksum(index) != index.get("crc32"):
        raise DamagedCheckpointError(f"{directory / INDEX} is damaged: its checksum does not match its content")
    if (found := index.get("format")) != FORMAT:
        raise CheckpointError(
            f"{directory} has checkpoint format {found}, this weft reads {FORMAT}; use the weft that wrote it"
        )
    return index


def require_whole(directory: Path, meshes: Sequence[Mesh]) -> None:
    """Refuse a checkpoint that is damaged, before any replica of this process loads it."""
    restore(directory)
    index = try_on_files(meshes[0].everyone("control"), "read", directory, lambda: read_index(directory))[0]
    for mesh in meshes:
        require_undamaged(directory, index, mesh)


def require_undamaged(directory: Path, index: dict[str, Any], mesh: Mesh) -> None:
    """Compare every file with its checksums, the pieces divided among the ranks; collective."""
    world = mesh.world
    records = [FileRecord(**record) for record in index["files"]]
    damage = find_damage(directory, records, rank=world.rank, num_ranks=world.size)
    found = gather_values(damage, mesh.everyone("control"))
    problems = list(dict.fromkeys(problem for part in found for problem in part))
    if problems:
        raise DamagedCheckpointError([*problems, f"{directory} cannot be used; go on from an older one"])


def first_of(items: list[str]) -> list[str]:
    """The first few of many things to show, and the number of the others."""
    rest = len(items) - _MOST_SHOWN
    return [*items[:_MOST_SHOWN], f"and {rest} more"] if rest > 0 else items


def _refuse_other_model(trainer: TrainerState, portable: Portable, index: dict[str, Any], directory: Path) -> None:
    """Refuse a checkpoint of another model or optimizer, with every difference in one error."""
    mine, theirs = portable.shapes, index["shapes"]
    problems = [f'"{name}" is missing from the checkpoint' for name in mine if name not in theirs]
    problems += [f'"{name}" of the checkpoint is not in this model' for name in theirs if name not in mine]
    problems += [
        f'"{name}" has shape {mine[name]} here, {theirs[name]} in the checkpoint'
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    ]
    if problems:
        head = f"{directory} is a checkpoint of another model; use the model it was written with"
        problems = [head, *first_of(problems)]
    optimizer = type(trainer.optimizer).__name__
    if index["optimizer"] != optimizer:
        problems.append(
            f"{directory} was written with optimizer {index['optimizer']}, this run's is {optimizer}; give this run "
            f"{index['optimizer']} too"
        )
    if problems:
        raise CheckpointError(problems)
