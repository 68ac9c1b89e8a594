"""The plan-bound part of a checkpoint: what one rank needs besides to go on to the bit under the same plan.

Random states, the exchange's state, buffers that a rank keeps for itself, and weight versions that flush-free pipelines
still hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.safetensors import TensorReader
from weft.checkpoint.state import TrainerState
from weft.parallel.state.buffers import persistent_buffers

_BUFFER, _PIPELINE = "buffer/", "pipeline/"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def take_rank_part(trainer: TrainerState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors, those of the model not copied, and metadata."""
    tensors = {"rng/cpu": torch.get_rng_state()}
    if trainer.mesh.world.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    tensors |= {f"{_BUFFER}{name}": buffer for name, buffer in persistent_buffers(trainer.named_model).items()}
    in_flight: dict[str, Any] = {}
    if trainer.pipeline_step is not None:
        kept, in_flight = trainer.pipeline_step.state()
        tensors |= {f"{_PIPELINE}{name}": tensor for name, tensor in kept.items()}
    shared = None if trainer.counts.shared is None else float(trainer.counts.shared)
    values = {
        "sync": trainer.sync.state(),
        "shared_count": shared,
        "pipeline": in_flight,
    }
    return tensors, {"values": json.dumps(values)}


@torch.no_grad()
def load_rank_part(trainer: TrainerState, directory: Path) -> None:
    """Go on from what `take_rank_part` took on this rank."""
    name, device = rank_file(trainer.mesh.world.rank), trainer.mesh.world.device
    with TensorReader(directory, [name], device) as reader:
        values = json.loads(reader.metadata(name)["values"])
        torch.set_rng_state(reader.read_whole("rng/cpu"))
        if device.type == "cuda" and "rng/cuda" in reader:  # not if it was written on a CPU
            torch.cuda.set_rng_state(reader.read_whole("rng/cuda"))
        for entry, buffer in persistent_buffers(trainer.named_model).items():
            buffer.copy_(reader.read_whole(f"{_BUFFER}{entry}"))
        kept = [entry for entry in reader.names if entry.startswith(_PIPELINE)]
        if trainer.pipeline_step is not None:
            older = {entry.removeprefix(_PIPELINE): reader.read_whole(entry) for entry in kept}
            trainer.pipeline_step.load_state(older, values["pipeline"])
    trainer.counts.shared = values["shared_count"]
    trainer.sync.load_state(values["sync"])
    if "update" in values:  # of an older checkpoint
        trainer.update.load_state(values["update"])
