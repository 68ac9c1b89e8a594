"""Which GPU each rank is bound to, and whether NCCL can connect them: decided alike on all ranks, from facts that they
exchange through the store before there is any process group.

Counting ranks and visible GPUs is not enough: under Slurm and Kubernetes each rank often sees one GPU, its own, so GPUs
are told apart by their UUIDs. NCCL refuses two ranks on one GPU unless `NCCL_HOSTID` says that they are on different
hosts. With `WEFT_SHARE_GPUS=1` weft sets that: ranks then take turns on the GPU, which shows that a plan works and not
how fast it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from weft.errors import LaunchError

SHARE_GPUS = "WEFT_SHARE_GPUS"
"""The variable that lets several ranks use one GPU."""
_HOST_ID = "NCCL_HOSTID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank runs."""

    host: str
    device: str
    gpu: str | None = None
    """The UUID of its GPU."""
    num_gpus: int = 0
    """GPUs that the rank sees."""
    nccl_host: str | None = None
    """The host that NCCL is told, where that is not the real one."""

    @property
    def machine(self) -> str:
        """The running kernel: containers of one machine are different hosts, and may have the same GPU."""
        return self.host.partition("/")[0]


def take_seat(host: str, device: torch.device, *, rank: int, environment: MutableMapping[str, str]) -> Seat:
    """This rank's seat; prepares the environment for ranks that share a GPU on purpose."""
    if device.type != "cuda":
        return Seat(host=host, device=str(device))
    prepare_sharing(rank, environment)
    return Seat(
        host=host,
        device=str(device),
        gpu=str(torch.cuda.get_device_properties(device).uuid),
        num_gpus=torch.cuda.device_count(),
        nccl_host=environment.get(_HOST_ID),
    )


def prepare_sharing(rank: int, environment: MutableMapping[str, str]) -> None:
    """Let NCCL take a rank for a host of its own, if ranks are to share GPUs."""
    if environment.get(SHARE_GPUS, "0") in ("", "0"):
        return
    environment.setdefault(_HOST_ID, f"weft-rank-{rank}")
    if environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE"):  # one real host
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_IB_DISABLE", "1")


def exchange_seats(store: Store, rank: int, size: int, seat: Seat) -> tuple[Seat, ...]:
    """Every rank's seat, through the store; collective."""
    number = store.add(f"weft/joined/{rank}", 1)  # a process may join more than once
    keys = [f"weft/seats/{number}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(asdict(seat)))
    store.wait(keys)
    can_get_all: bool = store.has_extended_api()  # type: ignore[attr-defined]
    texts = store.multi_get(keys) if can_get_all else [store.get(key) for key in keys]
    return tuple(Seat(**json.loads(text)) for text in texts)


def require_own_gpus(seats: Sequence[Seat]) -> None:
    """Refuse ranks of which some compute on GPUs and others do not, and ranks that share a GPU by mistake."""
    kinds: dict[str, list[int]] = {}
    for rank, seat in enumerate(seats):
        kinds.setdefault(seat.device.partition(":")[0], []).append(rank)
    if len(kinds) > 1:
        told = "; ".join(f"rank {_list(ranks)} on {kind}" for kind, ranks in kinds.items())
        raise LaunchError(f"ranks compute on different kinds of devices ({told}); give all of them the same one")
    together: dict[tuple[str, str], list[int]] = {}
    for rank, seat in enumerate(seats):
        if seat.gpu is not None:
            together.setdefault((seat.machine, seat.gpu), []).append(rank)
    problems = []
    for name in dict.fromkeys(seat.nccl_host for seat in seats if seat.nccl_host is not None):
        if (num_hosts := len({seat.machine for seat in seats if seat.nccl_host == name})) > 1:
            problems.append(f"{_HOST_ID}={name} is set on {num_hosts} hosts, which NCCL would take for one; unset it")
    for (machine, gpu), ranks in together.items():
        nccl_hosts = {seats[rank].nccl_host for rank in ranks}
        if len(ranks) > 1 and (None in nccl_hosts or len(nccl_hosts) < len(ranks)):
            problems.append(_say_shared(seats, machine, gpu, ranks))
    if problems:
        raise LaunchError(problems)


def _say_shared(seats: Sequence[Seat], machine: str, gpu: str, ranks: Sequence[int]) -> str:
    here = [seat for seat in seats if seat.machine == machine]
    num_gpus = max(max(seat.num_gpus for seat in here), len({seat.gpu for seat in here}))
    found = f"rank {_list(ranks)} use the same GPU ({gpu})"
    if len(here) > num_gpus:
        return (
            f"{found}: their host has {len(here)} ranks and {num_gpus} GPU{'s' if num_gpus > 1 else ''}; start "
            f"{num_gpus} there, or set {SHARE_GPUS}=1 to let ranks take turns, which is slow but shows if a plan works"
        )
    return (
        f"{found}, although their host has {num_gpus}: leave `device` out, so that each rank takes the GPU of its "
        "LOCAL_RANK, or let each see only its own (CUDA_VISIBLE_DEVICES)"
    )


def backend_of(device: torch.device, handle: dist.ProcessGroup | None) -> str:
    """What moves tensors of a device in a process group that exists."""
    if handle is None or device.type == "meta":
        return "gloo"
    name: str = handle._get_backend(torch.device(device.type)).name()
    return name.lower()


def slow_backend(seats: Sequence[Seat], backend: str) -> str | None:
    """A warning where tensors of GPUs go through gloo; None where they do not."""
    if backend != "gloo" or seats[0].gpu is None:
        return None
    return (
        "tensors of GPUs are exchanged over gloo, through host memory, many times slower than over NCCL; let weft make "
        'the process group, or make it with "cpu:gloo,cuda:nccl"'
    )


def needless_sharing(seats: Sequence[Seat], environment: Mapping[str, str]) -> str | None:
    """A warning where ranks may share GPUs and none does; None elsewhere."""
    gpus = [seat.gpu for seat in seats if seat.gpu is not None]
    if environment.get(SHARE_GPUS, "0") in ("", "0") or len(set(gpus)) < len(gpus) or len(gpus) < 2:
        return None
    return (
        f"{SHARE_GPUS}={environment[SHARE_GPUS]} is set, and every rank has a GPU of its own: they exchange as if on "
        "different hosts, without NVLink; unset it"
    )


def prepare_streams(environment: MutableMapping[str, str]) -> None:
    """Ask for as many hardware queues as a GPU has, before it is first used.

    A plan has one stream per communicator. With the usual 8 queues two of them may share one, and a message that waits
    for its sender would hold up a kernel of another stream, on which the sender may depend.
    """
    if not torch.cuda.is_initialized():
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
