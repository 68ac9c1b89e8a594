"""Loads pretrained weights from a local folder into a split model: every rank reads only its own parts.

Names are matched as they are, else with or without the model's `base_model_prefix`, which Hugging Face leaves out where
a bare model was saved; a tied weight may be stored under any of its names. Values are converted to the parameters'
dtype. The optimizer, the step and the data position do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from weft.checkpoint.files.agree import try_on_files
from weft.checkpoint.files.hugging_face import companion_files, weight_files
from weft.checkpoint.files.safetensors import TensorReader
from weft.checkpoint.folders import INDEX, restore
from weft.checkpoint.load import first_of, read_index, require_undamaged
from weft.checkpoint.new_layers import is_inside, layers_without_weights
from weft.checkpoint.portable import Portable
from weft.checkpoint.state import TrainerState
from weft.comm.objects import gather_values
from weft.errors import CheckpointError, LaunchError
from weft.parallel.state.buffers import persistent_buffers

log = logging.getLogger("weft")


def load_weights(trainer: TrainerState, folder: str | Path, *, new_layers: Sequence[str] = ()) -> None:
    """Fill a trainer's model with the weights in a folder, under any plan; collective.

    `*.safetensors` as Hugging Face stores them, with or without an index; or one of weft's own checkpoints. Missing
    tensors and wrong shapes are one error on all ranks, before anything changes; extra tensors are logged. Layers named
    in `new_layers` keep their values. A tokenizer's files in the folder are repeated in checkpoints.
    """
    if trainer.mesh.world.is_fake:
        raise LaunchError("load_weights() needs values, and a fake world has none; start the ranks with torchrun")
    trainer.wait_for_save()
    folder, world, everyone = Path(folder), trainer.mesh.world, trainer.mesh.everyone("control")
    try_on_files(everyone, "restore", folder, lambda: restore(folder) if world.rank == 0 else None)
    if any(try_on_files(everyone, "read", folder, lambda: (folder / INDEX).is_file())):
        index: dict[str, Any] = {}
        try_on_files(everyone, "read", folder, lambda: index.update(read_index(folder)))
        require_undamaged(folder, index, trainer.mesh)
    portable, readers = Portable(trainer), []
    with ExitStack() as opened:

        def open_files() -> None:
            readers.append(opened.enter_context(TensorReader(folder, weight_files(folder), world.device)))

        # Opened on every rank before any goes on, since what is wrong on one must be known to all.
        try_on_files(everyone, "read", folder, open_files)
        stored_as = _match(trainer, readers[0], folder, new_layers)

        def read() -> None:
            portable.read_model(readers[0], stored_as)
            if world.rank == 0:
                trainer.companions |= companion_files(folder)

        try_on_files(everyone, "read", folder, read)
        trainer.sync.publish()
        trainer.sync.restart(steps_done=trainer.steps_done)
        if trainer.pipeline_step is not None:
            trainer.pipeline_step.load_state({}, {})


def _spellings(model: nn.Module) -> dict[str, list[str]]:
    """Every name that each parameter and persistent buffer may have in the files, its own name first."""
    owners: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(owners.setdefault(id(parameter), name), []).append(name)
    aliases |= {name: [name] for name in persistent_buffers(model)}
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return aliases
    return {
        owner: [one for name in names for one in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")]
        for owner, names in aliases.items()
    }


def _match(trainer: TrainerState, reader: TensorReader, folder: Path, new_layers: Sequence[str]) -> dict[str, str]:
    """The name in the files of each parameter and buffer of this rank that is to be read; collective.

    Missing tensors and wrong shapes of any rank are refused in one error; extra and new tensors are logged once.
    """
    layouts = trainer.layouts
    spellings = _spellings(trainer.named_model)
    stored = {name: [one for one in names if one in reader.entries] for name, names in spellings.items()}
    new = [name for name in stored if is_inside(name, new_layers)]
    problems = {}
    for name, found in stored.items():
        if name in new:
            continue
        if not found:
            problems[name] = f'"{name}" is in no file'
        elif (shape := reader.entries[found[0]].shape) != layouts[name].global_shape:
            here = list(layouts[name].global_shape)
            problems[name] = f'"{name}" has shape {here} here, {list(shape)} in the files'
    read = {name: found[0] for name, found in stored.items() if name not in problems and name not in new}
    used = [one for found in stored.values() for one in found]
    seen = gather_values([problems, used, new, list(read)], trainer.mesh.everyone("control"))
    problems = {name: problem for part, *_ in seen for name, problem in part.items()}
    everything_read = list(dict.fromkeys(name for *_, part in seen for name in part))
    if problems or not everything_read:
        head = f"{folder} does not hold the weights of this model; nothing was changed"
        meant = layers_without_weights(problems, everything_read)
        way_out = f"if {_listed(meant)} {'is' if len(meant) == 1 else 'are'} new, say so: new_layers = {meant}"
        raise CheckpointError([head, *first_of(list(problems.values())), *([way_out] if meant else [])])
    if trainer.mesh.world.rank == 0:
        extra = sorted(reader.entries.keys() - {name for _, part, *_ in seen for name in part})
        if extra:
            log.warning("%s holds %d tensors that this model does not have: %s",
                        folder, len(extra), ", ".join(first_of(extra)))  # fmt: skip
        if drawn := list(dict.fromkeys(name for _, _, part, _ in seen for name in part)):
            log.warning("%s: %d tensors are new, not read: %s", folder, len(drawn), ", ".join(first_of(drawn)))
    return read


def _listed(layers: Sequence[str]) -> str:
    return ", ".join(f'"{layer}"' for layer in layers)
