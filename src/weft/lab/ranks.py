"""Which processes run on which host, and the environment each is told of its place by: torchrun's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from weft.lab.namespaces import DEVICE
from weft.lab.network import Network, host_address, host_name

MASTER_PORT = 29500
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process to start."""

    host: int
    name: str
    """What messages call it."""
    environment: dict[str, str]


def processes(
    network: Network, *, per_host: bool, outside: Mapping[str, str], variables: Mapping[str, str]
) -> list[Started]:
    """The command's processes, one a rank or one a host. `outside` is the environment the lab was started in."""
    common = {
        name: value for name, value in outside.items() if name not in _OF_A_LAUNCHER and "TORCHELASTIC" not in name
    }
    common.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // network.num_ranks)))
    common |= variables
    common |= {
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "WEFT_LAB_HOSTS": str(len(network.hosts)),
        **{f"{library}_SOCKET_IFNAME": DEVICE for library in ("GLOO", "NCCL", "TP")},
    }
    started: list[Started] = []
    for number, host in enumerate(network.hosts):
        here = {**common, "WEFT_LAB_HOST": str(number), "WEFT_LAB_ADDRESS": host_address(number)}
        if per_host:
            started.append(
                Started(host=number, name=host_name(number), environment={**here, **_for_torchrun(network, number)})
            )
            continue
        for local_rank in range(host.ranks):
            rank = len(started)
            environment = {
                "RANK": rank,
                "WORLD_SIZE": network.num_ranks,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": host.ranks,
                "GROUP_RANK": number,
                "GROUP_WORLD_SIZE": len(network.hosts),
            }
            name = f"rank {rank} on {host_name(number)}"
            numbers = {variable: str(value) for variable, value in environment.items()}
            started.append(Started(host=number, name=name, environment={**here, **numbers}))
    return started


def _for_torchrun(network: Network, number: int) -> dict[str, str]:
    """torchrun reads its flags from variables of these names, so `torchrun script.py` needs none; a flag wins."""
    return {
        "PET_NNODES": str(len(network.hosts)),
        "PET_NODE_RANK": str(number),
        "PET_NPROC_PER_NODE": str(network.hosts[number].ranks),
        "PET_MASTER_ADDR": host_address(0),
        "PET_MASTER_PORT": str(MASTER_PORT),
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
