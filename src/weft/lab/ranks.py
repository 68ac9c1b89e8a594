"""The processes of each host, and their environment: torchrun's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from weft.hosts import num_cores
from weft.lab.namespaces import DEVICE
from weft.lab.network import Network, host_address, host_name

MASTER_PORT = 29500
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """A process to start on a host."""

    host: int
    name: str
    """Its name in messages."""
    environment: dict[str, str]


def processes(network: Network, *, per_host: bool, variables: Mapping[str, str]) -> list[PlannedProcess]:
    """The command's processes, one per rank or one per host, with these variables beside this process's own."""
    inherited = (name for name in os.environ if name not in _LAUNCHER_VARIABLES and "TORCHELASTIC" not in name)
    common = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // network.num_ranks)),
        **{name: os.environ[name] for name in inherited},
        **variables,
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "WEFT_LAB_HOSTS": str(len(network.hosts)),
        **{f"{library}_SOCKET_IFNAME": DEVICE for library in ("GLOO", "NCCL", "TP")},
    }
    planned: list[PlannedProcess] = []
    for number, host in enumerate(network.hosts):
        here = {**common, "WEFT_LAB_HOST": str(number), "WEFT_LAB_ADDRESS": host_address(number)}
        if per_host:  # torchrun reads its flags from variables of these names; a flag wins
            environment = {
                **here,
                "PET_NNODES": str(len(network.hosts)),
                "PET_NODE_RANK": str(number),
                "PET_NPROC_PER_NODE": str(host.ranks),
                "PET_MASTER_ADDR": host_address(0),
                "PET_MASTER_PORT": str(MASTER_PORT),
            }
            planned.append(PlannedProcess(host=number, name=host_name(number), environment=environment))
            continue
        for local_rank in range(host.ranks):
            rank = len(planned)
            environment = {
                **here,
                "RANK": str(rank),
                "WORLD_SIZE": str(network.num_ranks),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(host.ranks),
                "GROUP_RANK": str(number),
                "GROUP_WORLD_SIZE": str(len(network.hosts)),
            }
            name = f"rank {rank} on {host_name(number)}"
            planned.append(PlannedProcess(host=number, name=name, environment=environment))
    return planned
