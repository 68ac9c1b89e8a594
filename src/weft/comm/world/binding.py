"""Which GPU each rank is bound to, and whether NCCL can connect them: decided on every rank in the same way, from what
ranks exchange through the store before there is any process group.

Counting ranks and visible GPUs is not enough: under Slurm and Kubernetes each rank often sees one GPU, its own, so GPUs
are told apart by their UUIDs. NCCL refuses two ranks on one GPU unless `NCCL_HOSTID` says that they are on different
hosts. With `WEFT_SHARE_GPUS=1` weft sets that: ranks then take turns on the GPU, which shows that a plan works and not
how fast it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from weft.comm.world.agreement import own_versions, require_same_plans, require_same_versions
from weft.errors import LaunchError
from weft.units import name_ranks

SHARE_GPUS = "WEFT_SHARE_GPUS"
"""The variable that lets several ranks use one GPU."""
_HOST_ID = "NCCL_HOSTID"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """The host and the device that a rank runs on."""

    host: str
    device: str
    gpu_uuid: str | None = None
    """None without a GPU."""
    num_gpus: int = 0
    """GPUs that the rank sees."""
    nccl_host_id: str | None = None
    """`NCCL_HOSTID`: NCCL takes ranks with the same value for ranks of one host; None: not set."""
    plan: str = ""
    """The text of the plan that the rank was given, if it has one yet."""

    @property
    def machine(self) -> str:
        """The running kernel: containers of one machine are different hosts, and may have the same GPU."""
        return self.host.partition("/")[0]


def find_location(host: str, device: torch.device, *, rank: int, environment: MutableMapping[str, str]) -> RankLocation:
    """This rank's location; prepares the environment for ranks that share a GPU on purpose."""
    if device.type != "cuda":
        return RankLocation(host=host, device=str(device))
    prepare_sharing(rank, environment)
    return RankLocation(
        host=host,
        device=str(device),
        gpu_uuid=str(torch.cuda.get_device_properties(device).uuid),
        num_gpus=torch.cuda.device_count(),
        nccl_host_id=environment.get(_HOST_ID),
    )


def prepare_sharing(rank: int, environment: MutableMapping[str, str]) -> None:
    """Tell NCCL that every rank has a host of its own, if ranks are to share GPUs."""
    if environment.get(SHARE_GPUS, "0") in ("", "0"):
        return
    environment.setdefault(_HOST_ID, f"weft-rank-{rank}")
    if environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE"):  # one real host
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_IB_DISABLE", "1")


def exchange_locations(store: Store, rank: int, size: int, location: RankLocation) -> tuple[RankLocation, ...]:
    """Every rank's location, through the store; collective."""
    number = store.add(f"weft/joined/{rank}", 1)  # a process may join more than once
    keys = [f"weft/locations/{number}/{other}" for other in range(size)]
    # Every rank reads what every rank says, so a plan is told by its checksum, and its text is there once.
    plan = hashlib.sha256(location.plan.encode()).hexdigest() if location.plan else ""
    if plan:
        store.set(_plan_key(plan), location.plan)
    store.set(keys[rank], json.dumps({**asdict(location), "plan": plan, "versions": own_versions()}))
    store.wait(keys)
    can_get_all: bool = store.has_extended_api()  # type: ignore[attr-defined]
    texts = store.multi_get(keys) if can_get_all else [store.get(key) for key in keys]
    said = [json.loads(text) for text in texts]
    require_same_versions([one.pop("versions", {}) for one in said])  # first: others may say other things
    told = [one.pop("plan") for one in said]
    plans = {plan: store.get(_plan_key(plan)).decode() if plan else "" for plan in dict.fromkeys(told)}
    require_same_plans([plans[plan] for plan in told])
    return tuple(RankLocation(**one, plan=plans[plan]) for one, plan in zip(said, told, strict=True))


def _plan_key(checksum: str) -> str:
    return f"weft/plans/{checksum}"


def ranks_on_device(locations: Sequence[RankLocation], rank: int) -> int:
    """The number of ranks that share the memory of a rank's device. GPUs are told apart by UUIDs: each rank may see
    its own one alone."""
    here = locations[rank]
    if here.gpu_uuid is None:
        return sum(one.host == here.host for one in locations)
    return sum((one.machine, one.gpu_uuid) == (here.machine, here.gpu_uuid) for one in locations)


def require_own_gpus(locations: Sequence[RankLocation]) -> None:
    """Refuse ranks of which some compute on GPUs and others do not, and ranks that share a GPU by mistake."""
    kinds: dict[str, list[int]] = {}
    for rank, location in enumerate(locations):
        kinds.setdefault(location.device.partition(":")[0], []).append(rank)
    if len(kinds) > 1:
        found = "; ".join(f"{name_ranks(ranks)} on {kind}" for kind, ranks in kinds.items())
        raise LaunchError(f"ranks compute on different kinds of devices ({found}); give all of them the same one")
    together: dict[tuple[str, str], list[int]] = {}
    for rank, location in enumerate(locations):
        if location.gpu_uuid is not None:
            together.setdefault((location.machine, location.gpu_uuid), []).append(rank)
    problems = []
    for name in dict.fromkeys(location.nccl_host_id for location in locations if location.nccl_host_id is not None):
        if (num_hosts := len({location.machine for location in locations if location.nccl_host_id == name})) > 1:
            problems.append(f"{_HOST_ID}={name} is set on {num_hosts} hosts, which NCCL would take for one; unset it")
    for (machine, gpu_uuid), ranks in together.items():
        nccl_host_ids = {locations[rank].nccl_host_id for rank in ranks}
        if len(ranks) > 1 and (None in nccl_host_ids or len(nccl_host_ids) < len(ranks)):
            problems.append(_shared_gpu_problem(locations, machine, gpu_uuid, ranks))
    if problems:
        raise LaunchError(problems)


def _shared_gpu_problem(locations: Sequence[RankLocation], machine: str, gpu_uuid: str, ranks: Sequence[int]) -> str:
    here = [location for location in locations if location.machine == machine]
    num_gpus = max(max(location.num_gpus for location in here), len({location.gpu_uuid for location in here}))
    found = f"{name_ranks(ranks)} use the same GPU ({gpu_uuid})"
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
    """The c10d backend of a device's tensors in an existing process group."""
    if handle is None or device.type == "meta":
        return "gloo"
    name: str = handle._get_backend(torch.device(device.type)).name()
    return name.lower()


def slow_backend_warning(locations: Sequence[RankLocation], backend: str) -> str | None:
    """A warning where tensors of GPUs go through gloo; None where they do not."""
    if backend != "gloo" or locations[0].gpu_uuid is None:
        return None
    return (
        "tensors of GPUs are exchanged over gloo, through host memory, many times slower than over NCCL; let weft make "
        'the process group, or make it with "cpu:gloo,cuda:nccl"'
    )


def needless_sharing_warning(locations: Sequence[RankLocation], environment: Mapping[str, str]) -> str | None:
    """A warning where ranks may share GPUs and none does; None elsewhere."""
    uuids = [location.gpu_uuid for location in locations if location.gpu_uuid is not None]
    if environment.get(SHARE_GPUS, "0") in ("", "0") or len(set(uuids)) < len(uuids) or len(uuids) < 2:
        return None
    return (
        f"{SHARE_GPUS}={environment[SHARE_GPUS]} is set, and every rank has a GPU of its own: they exchange as if on "
        "different hosts, without NVLink; unset it"
    )


def request_hardware_queues(environment: MutableMapping[str, str]) -> None:
    """Ask CUDA for as many hardware queues as a GPU has, before the GPU is first used.

    A plan has one stream per communicator. With the usual 8 queues two of them may share one, and a message that waits
    for its sender would hold up a kernel of another stream, on which the sender may depend.
    """
    if not torch.cuda.is_initialized():
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def number_hosts(locations: Sequence[RankLocation]) -> tuple[int, ...]:
    """The number of each rank's host, counted in the order of first ranks."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(location.host, len(numbers)) for location in locations)
