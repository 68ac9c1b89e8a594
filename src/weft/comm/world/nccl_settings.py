"""Checks of the environment and of a GPU's free memory before NCCL's communicators are made; pure functions.

Environments are often copied from other projects, and a variable that was right there may make this plan hang. What
cannot work is refused with all problems at once; what works slowly is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.errors import LaunchError
from weft.plan.partition.groups import num_communicators
from weft.plan.plan import Plan
from weft.units import format_bytes

_MOST_QUEUES = 32
"""Hardware queues that a GPU has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclFindings:
    """What is wrong with the variables of NCCL, of CUDA and of torch's use of both."""

    refused: tuple[str, ...]
    """Ranks would hang, or could not be connected."""
    warned: tuple[str, ...]
    """Results are right, but ranks are slow, or errors are noticed late."""


def nccl_problems(environment: Mapping[str, str], plan: Plan, *, hosts: Sequence[int]) -> NcclFindings:
    """Variables that contradict a plan whose tensors are exchanged over NCCL; `hosts`: the number of each rank's
    host."""
    refused, warned = [], []

    def is_set(name: str) -> bool:
        return environment.get(name, "0") not in ("", "0")

    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        said = "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a GPU into one queue"
        if plan.axes.pipeline > 1:
            refused.append(f"{said}, where a message that waits for its sender holds up every other exchange; unset it")
        else:
            warned.append(f"{said}, so exchanges do not overlap computation; unset it")
    queues, streams = _number(environment.get("CUDA_DEVICE_MAX_CONNECTIONS")), num_communicators(plan) + 2
    if plan.axes.pipeline > 1 and queues is not None and 1 < queues < min(streams, _MOST_QUEUES):
        warned.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={queues} is less than the plan's {streams} streams, so a message that "
            "waits for its sender may hold up a kernel that the sender needs, for ever; unset it, and weft asks for "
            f"{_MOST_QUEUES}"
        )
    if is_set("CUDA_LAUNCH_BLOCKING"):
        said = "CUDA_LAUNCH_BLOCKING=1 makes the host wait for every kernel"
        if plan.axes.pipeline > 1:
            refused.append(f"{said}, so two stages that send to each other deadlock; unset it")
        else:
            warned.append(f"{said}, so nothing overlaps; unset it, unless this run looks for an error")
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if is_set(name):
            warned.append(f"{name}={environment[name]} makes the host wait for every exchange; unset it")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if environment.get(name) == "0":
            warned.append(f"{name}=0: a rank that lost a peer may wait for ever; unset it")
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if environment.get(name) == "0":
            warned.append(f"{name}=0: an exchange that times out cannot be named; unset it")
    num_hosts = len(set(hosts))
    interfaces = environment.get("NCCL_SOCKET_IFNAME", "")
    if num_hosts > 1 and {one.strip("= ") for one in interfaces.split(",")} == {"lo"}:
        refused.append(
            f"NCCL_SOCKET_IFNAME={interfaces} is the loopback, and the ranks are on {num_hosts} hosts; unset it, or "
            "name the interface between them"
        )
    for unit in ("NCHANNELS", "CTAS"):
        least, most = (_number(environment.get(f"NCCL_{end}_{unit}")) for end in ("MIN", "MAX"))
        if least is not None and most is not None and least > most:
            refused.append(f"NCCL_MIN_{unit}={least} is more than NCCL_MAX_{unit}={most}; unset one of them")
    if len(hosts) > num_hosts and is_set("NCCL_P2P_DISABLE") and is_set("NCCL_SHM_DISABLE"):
        warned.append(
            "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE are both set, so GPUs of one host exchange through its network; "
            "unset one of them"
        )
    return NcclFindings(refused=tuple(refused), warned=tuple(warned))


def require_room_for_communicators(*, free_bytes: int, num_communicators: int, bytes_each: int, device: str) -> None:
    """Refuse a plan whose communicators do not fit the memory that is free on a GPU."""
    needed = num_communicators * bytes_each
    if needed > free_bytes:
        raise LaunchError(
            f"{device} has {format_bytes(free_bytes)} free, and the plan's {num_communicators} NCCL communicators take "
            f"about {format_bytes(needed)} ({format_bytes(bytes_each)} each); end what else uses this GPU, use fewer "
            "axes, or make communicators smaller (NCCL_BUFFSIZE=1048576, NCCL_MAX_CTAS=8)"
        )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None
