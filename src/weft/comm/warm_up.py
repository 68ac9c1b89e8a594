"""The first exchange of a group whose backend connects ranks at first use, as NCCL does.

NCCL makes a communicator in its first exchange, and connects each *direction* of a pair at its first message; hosts
block in both until the other ranks join. In the middle of a schedule they would join in different orders and deadlock.
So every group makes one exchange of its kind when the mesh is made, in one order on all ranks.
"""

from __future__ import annotations

import torch

from weft.comm.collectives import all_reduce, all_to_all
from weft.comm.group import Group
from weft.comm.p2p import exchange, receive, send


def warm_up(group: Group) -> int:
    """Make a group's communicator and connections; returns the bytes of device memory they took. Collective."""
    before = _free_bytes(group.device)
    probe = torch.zeros(group.size, device=group.device)
    match group.purpose:
        case "neighbours":
            following, previous = (group.index + 1) % group.size, (group.index - 1) % group.size
            exchange([(probe, following)], [(torch.empty_like(probe), previous)], group).wait()
        case "heads":
            all_to_all(torch.empty_like(probe), probe, group)
        case purpose if is_one_way(group.axis, purpose):
            _exchange_once(probe, group)
        case _:
            all_reduce(probe, group)
    if group.device.type == "cuda":
        torch.cuda.current_stream(group.device).synchronize()
    return max(before - _free_bytes(group.device), 0)


def is_one_way(axis: str, purpose: str) -> bool:
    """True for groups of two ranks whose messages all go in one direction."""
    return axis == "pipeline" and purpose.startswith(("activations", "gradients"))


def _exchange_once(probe: torch.Tensor, group: Group) -> None:
    """Send one message in each direction between the two ranks."""
    for source, target in ((0, 1), (1, 0)):
        if group.index == source:
            send(probe, group, to=target).wait()
        else:
            receive(probe, group, source=source).wait()


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
