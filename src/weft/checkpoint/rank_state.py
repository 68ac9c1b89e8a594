"""The plan-specific part of a checkpoint: the state of one rank that an exact continuation under the same plan needs.

Random states, the sync's state, what its codecs keep (`codec_state.py`, `worker_parts.py`), shares of microbatches,
buffers that differ between ranks, weight versions that flush-free pipelines hold, and all that replicas have of their
own which differ between exchanges (`replicas.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.codec_state import load_own_codecs, take_own_codecs
from weft.checkpoint.extra_state import take_extra
from weft.checkpoint.files.safetensors import TensorReader, rank_file
from weft.checkpoint.replicas import load_own, take_own
from weft.checkpoint.state import TrainerState
from weft.checkpoint.worker_parts import load_worker_part, take_codecs, take_values
from weft.parallel.state.buffers import persistent_buffers

_BUFFER, _PIPELINE = "buffer/", "pipeline/"


def take_rank_part(trainer: TrainerState, number: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors (those of the model are not copied) and metadata of this rank's file; collective. `number`: of the data
    ranks that one process plays, which differ in what their codecs keep alone.

    Rank 0's file also holds the state of the user's own, which any plan reads.
    """
    tensors = {"rng/cpu": torch.get_rng_state(), **take_codecs(trainer)}
    if trainer.mesh.world.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    tensors |= {f"{_BUFFER}{name}": buffer for name, buffer in persistent_buffers(trainer.named_model).items()}
    in_flight: dict[str, Any] = {}
    if trainer.pipeline_step is not None:
        kept, in_flight = trainer.pipeline_step.state()
        tensors |= {f"{_PIPELINE}{name}": tensor for name, tensor in kept.items()}
    own, own_values = take_own(trainer)
    shared = None if trainer.counts.shared is None else float(trainer.counts.shared)
    values = {
        "sync": trainer.sync.state(),
        "shared_count": shared,
        "has_own_count": trainer.counts.is_own,
        "pipeline": in_flight,
        "replica": own_values,
        "balance": trainer.balance.state(),
        "worker": take_values(trainer),
    }
    extra: dict[str, torch.Tensor] = {}
    stored: dict[str, str] = {}
    if number == 0:
        extra, stored = take_extra(trainer.extra_state, trainer.mesh.everyone("control"))
    return {**tensors, **own, **take_own_codecs(trainer, number), **extra}, {"values": json.dumps(values), **stored}


@torch.no_grad()
def load_rank_part(trainer: TrainerState, directory: Path) -> None:
    """Restore what `take_rank_part` took on this rank."""
    name, device = rank_file(trainer.mesh.world.rank), trainer.mesh.world.device
    with TensorReader(directory, [name], device) as reader:
        values = json.loads(reader.metadata[name]["values"])
        torch.set_rng_state(reader.read_whole("rng/cpu"))
        if device.type == "cuda" and "rng/cuda" in reader.entries:  # absent if it was written on a CPU
            torch.cuda.set_rng_state(reader.read_whole("rng/cuda"))
        for entry, buffer in persistent_buffers(trainer.named_model).items():
            buffer.copy_(reader.read_whole(f"{_BUFFER}{entry}"))
        if trainer.pipeline_step is not None:
            kept = [entry for entry in reader.entries if entry.startswith(_PIPELINE)]
            older = {entry.removeprefix(_PIPELINE): reader.read_whole(entry) for entry in kept}
            trainer.pipeline_step.load_state(older, values["pipeline"])
        trainer.sync.load_state(values["sync"])  # makes room for exchanges under way, which are read next
        load_own(trainer, reader, values.get("replica", {}))  # older checkpoints have none
        trainer.counts.shared = values["shared_count"]
        trainer.counts.is_own = values.get("has_own_count", False)  # older checkpoints do not say
        load_worker_part(trainer, directory, reader, values)
    load_own_codecs(trainer, directory, trainer.mesh.world.rank)
    trainer.balance.load_state(values.get("balance", {}))  # which are not in older ones either
