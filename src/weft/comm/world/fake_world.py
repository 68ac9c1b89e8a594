"""A fake world: one rank of many without the others, to look at a plan before there are machines.

torch's "fake" process group has the rank and the number of ranks. Everything is on the meta device, without memory or
values. A group of a fake world knows its ranks but has no handle, and collectives on it return at once. So a model can
be cut and placed as one rank of 1,024 would have it; it cannot be run.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from weft.errors import LaunchError

_RANKS_PER_HOST = 8


def is_fake() -> bool:
    """True if the other ranks of this world do not exist."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def refuse_half_fake(device: torch.device) -> None:
    """Real tensors would stay unchanged where ranks should exchange them, and be silently wrong."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if is_fake() and device.type != "meta":
        raise LaunchError(
            f'the process group is torch\'s "fake" one, whose other {size - 1} ranks do not exist, and this rank is to '
            f'compute on {device}; give parallelize(..., device="meta"), or start real ranks with torchrun'
        )
    if device.type == "meta" and size > 1 and not is_fake():
        raise LaunchError(
            f"the {size} ranks of this run are real, and the meta device has no values that they could exchange; give "
            'another device, or make a fake world: torch.distributed.init_process_group("fake", ...) in one process'
        )


def ranks_per_host() -> int:
    """Ranks on each host of a fake world: torchrun's number, or as many as machines have GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", _RANKS_PER_HOST))
