"""Exchange of a model's buffers after a step, as `[data] buffers` says.

synchronise   BatchNorm computed the same ones on all ranks (`parallel/state/batchnorm.py`): nothing is exchanged
broadcast     each rank normalises by its own samples, and takes over the running statistics of its replica's first rank
local         each rank keeps its own; a checkpoint holds their mean

All inside a replica, where replicas differ between exchanges: these average the statistics themselves.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.comm.collectives import all_reduce, broadcast
from weft.mesh import Mesh


@torch.no_grad()
def broadcast_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Give a replica's data ranks the first one's buffers, one message per dtype, if the plan says so; collective."""
    if mesh.plan.data.buffers != "broadcast" or mesh.num_batch_parts * mesh.sequence_size == 1:
        return
    # Looked up in every step, because a layer may replace its buffer instead of writing into it.
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in persistent_buffers(model).values():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        for group in mesh.batch_groups:
            broadcast(flat, group)
        for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the model's state dict, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def consensus_buffers(model: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    """A replica's buffers for a checkpoint: those its ranks share, or the mean where each keeps its own; collective."""
    buffers = persistent_buffers(model)
    num_ranks = mesh.num_batch_parts * mesh.sequence_size
    if mesh.plan.data.buffers != "local" or num_ranks == 1:
        return buffers
    agreed = {}
    for name, buffer in buffers.items():
        agreed[name] = buffer
        if buffer.is_floating_point():
            agreed[name] = buffer.clone()
            for group in mesh.batch_groups:
                all_reduce(agreed[name], group)
            agreed[name] /= num_ranks
    return agreed
