"""Pretrained weights from a local folder straight into a split model: every rank reads just its own parts.

Names are matched as they are, else with or without the model's `base_model_prefix`, which Hugging Face leaves out where
a bare model was saved; a weight that is tied may be there under any of its names. Values are converted to the dtype
that is held. The optimizer, the step and the data position stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from weft.checkpoint.folders import INDEX, restore
from weft.checkpoint.hugging_face import weight_files
from weft.checkpoint.load import read_index, require_undamaged
from weft.checkpoint.portable import Portable
from weft.checkpoint.safetensors import TensorReader
from weft.checkpoint.state import TrainerState
from weft.comm.agree import try_on_files
from weft.comm.objects import gather_values
from weft.errors import CheckpointError, LaunchError
from weft.parallel.state.buffers import persistent_buffers

_MOST_SHOWN = 8

log = logging.getLogger("weft")


def load_weights(trainer: TrainerState, folder: str | Path) -> None:
    """Fill a trainer's model with the weights in a folder, under any plan; collective.

    `*.safetensors` as Hugging Face stores them, with or without an index; or one of weft's own checkpoints. Missing and
    misshapen tensors are one error on all ranks, before anything changes; extra ones are logged.
    """
    if trainer.mesh.world.is_fake:
        raise LaunchError("load_weights() needs values, and this rank is only imagined; start the ranks with torchrun")
    trainer.wait_for_save()
    folder, world, everyone = Path(folder), trainer.mesh.world, trainer.mesh.everyone("control")
    try_on_files(everyone, "restore", folder, lambda: restore(folder) if world.rank == 0 else None)
    if any(try_on_files(everyone, "read", folder, lambda: (folder / INDEX).is_file())):
        index: dict[str, Any] = {}
        try_on_files(everyone, "read", folder, lambda: index.update(read_index(folder)))
        require_undamaged(folder, index, trainer.mesh)
    portable, readers = Portable(trainer), []
    try:
        # Opened on every rank before any goes on, since what is wrong on one must be known to all.
        try_on_files(
            everyone,
            "read",
            folder,
            lambda: readers.append(TensorReader(folder, weight_files(folder), world.device)),
        )
        reader = readers[0]
        stored_as = _match(trainer.named_model, reader)
        _require_fitting(trainer, reader, stored_as, folder)
        try_on_files(everyone, "read", folder, lambda: portable.read_model(reader, stored_as))
        trainer.sync.publish()
        if trainer.pipeline_step is not None:
            trainer.pipeline_step.load_state({}, {})
    finally:
        for reader in readers:
            reader.close()


def _match(model: nn.Module, stored: Container[str]) -> dict[str, str]:
    """Of every parameter and buffer held here that is in the files, the name that it has there."""
    aliases = _aliases(model)
    prefix = getattr(model, "base_model_prefix", "")
    found = {}
    for name, names in aliases.items():
        present = (other for alias in names for other in _spellings(alias, prefix) if other in stored)
        first = next(present, None)
        if first is not None:
            found[name] = first
    return found


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Of every parameter and persistent buffer: all its names, the one that checkpoints use first."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases: dict[str, list[str]] = {name: [name] for name in (*first.values(), *persistent_buffers(model))}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first[id(parameter)]
        aliases[owner] += [name] if name != owner else []
    return aliases


def _spellings(name: str, prefix: str) -> Iterable[str]:
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]


def _require_fitting(trainer: TrainerState, reader: TensorReader, stored_as: dict[str, str], folder: Path) -> None:
    """Refuse what is missing or misshapen anywhere, in one error; log once what nobody wants. Collective."""
    model, layouts, world = trainer.named_model, trainer.layouts, trainer.mesh.world
    problems = []
    for name in _aliases(model):
        if name not in stored_as:
            problems.append(f'"{name}" is in no file')
        elif (shape := reader.entry(stored_as[name]).shape) != layouts[name].global_shape:
            problems.append(f'"{name}" has shape {list(layouts[name].global_shape)} here, {list(shape)} in the files')
    prefix = getattr(model, "base_model_prefix", "")
    known = [other for names in _aliases(model).values() for alias in names for other in _spellings(alias, prefix)]
    used = [name for name in known if name in reader]
    stages = gather_values([problems, used], trainer.mesh.everyone("control"), world.device)
    found = list(dict.fromkeys(problem for part, _ in stages for problem in part))
    if found:
        shown, rest = found[:_MOST_SHOWN], len(found) - _MOST_SHOWN
        more = [f"and {rest} more like these"] if rest > 0 else []
        raise CheckpointError([f"{folder} does not hold the weights of this model; nothing was changed", *shown, *more])
    extra = sorted(set(reader.names) - {name for _, part in stages for name in part})
    if extra and world.rank == 0:
        named = ", ".join(extra[:_MOST_SHOWN]) + (", ..." if len(extra) > _MOST_SHOWN else "")
        log.warning("%s holds %d tensors that this model does not have: %s", folder, len(extra), named)
