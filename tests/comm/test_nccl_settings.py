"""Variables that contradict a plan, and GPUs too full for its communicators: one clear sentence each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.comm.world.binding import RankLocation, require_own_gpus
from weft.comm.world.nccl_settings import nccl_problems, require_room_for_communicators
from weft.errors import LaunchError
from weft.plan.partition.groups import num_communicators
from weft.plan.plan import Axes, Plan

PIPELINE, DATA = Plan(axes=Axes(pipeline=2)), Plan(axes=Axes(data=2))
ONE_HOST, TWO_HOSTS = (0, 0), (0, 1)


@pytest.mark.parametrize(
    ("text", "plan", "hosts", "problem"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS=1", PIPELINE, ONE_HOST, "one queue, where a message"),
        ("CUDA_LAUNCH_BLOCKING=1", PIPELINE, ONE_HOST, "two stages that send to each other deadlock"),
        (
            "NCCL_SOCKET_IFNAME=lo",
            DATA,
            TWO_HOSTS,
            "=lo is the loopback, and the ranks are on 2 hosts",
        ),
        ("NCCL_SOCKET_IFNAME==lo", DATA, TWO_HOSTS, "is the loopback"),
        ("NCCL_MIN_NCHANNELS=8 NCCL_MAX_NCHANNELS=4", DATA, ONE_HOST, "NCCL_MIN_NCHANNELS=8 is more than NCCL_MAX"),
    ],
)
def test_what_cannot_work_is_refused(text: str, plan: Plan, hosts: tuple[int, ...], problem: str) -> None:
    found = nccl_problems(variables(text), plan, hosts=hosts)
    assert len(found.refused) == 1 and problem in found.refused[0] and found.warned == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS=1", "exchanges do not overlap computation"),
        ("CUDA_LAUNCH_BLOCKING=1", "nothing overlaps"),
        ("TORCH_NCCL_BLOCKING_WAIT=1", "TORCH_NCCL_BLOCKING_WAIT=1 makes the host wait"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0", "may wait for ever"),
        ("TORCH_FR_BUFFER_SIZE=0", "cannot be named"),
        ("NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1", "through its network"),
    ],
)
def test_what_is_only_slow_is_a_warning(text: str, problem: str) -> None:
    found = nccl_problems(variables(text), DATA, hosts=ONE_HOST)
    assert len(found.warned) == 1 and problem in found.warned[0] and found.refused == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_LAUNCH_BLOCKING=0 TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        "NCCL_SOCKET_IFNAME=lo",
        "NCCL_SOCKET_IFNAME=^lo NCCL_P2P_DISABLE=1",
        "NCCL_MIN_NCHANNELS=4 NCCL_MAX_NCHANNELS=4",
    ],
)
def test_what_works_is_let_pass(text: str) -> None:
    hosts = TWO_HOSTS if "^" in text else ONE_HOST
    found = nccl_problems(variables(text), PIPELINE, hosts=hosts)
    assert found.refused == found.warned == ()


def test_fewer_queues_than_the_streams_of_a_pipeline_are_warned_of() -> None:
    plan = Plan(axes=Axes(pipeline=4, data=2, tensor=2))
    streams = num_communicators(plan) + 2
    few, enough = (
        nccl_problems({"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}, plan, hosts=(0,) * 16)
        for queues in (streams - 1, streams)
    )
    assert len(few.warned) == 1 and f"the plan's {streams} streams" in few.warned[0] and few.refused == ()
    assert enough.warned == ()


def test_all_problems_come_at_once() -> None:
    text = "CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_LAUNCH_BLOCKING=1 NCCL_SOCKET_IFNAME=lo NCCL_BLOCKING_WAIT=1"
    found = nccl_problems(variables(text), PIPELINE, hosts=TWO_HOSTS)
    assert (len(found.refused), len(found.warned)) == (3, 1)


def test_a_gpu_too_full_for_the_communicators_is_refused() -> None:
    room = {"num_communicators": 5, "bytes_each": 200 << 20, "device": "cuda:3"}
    require_room_for_communicators(free_bytes=1000 << 20, **room)
    with pytest.raises(LaunchError, match=r"cuda:3 has 999.0 MiB free.* 5 NCCL communicators take about 1000.0 MiB"):
        require_room_for_communicators(free_bytes=999 << 20, **room)


def test_one_name_for_two_hosts_is_refused() -> None:
    named = [
        RankLocation(host=host, device="cuda:0", gpu_uuid=host, num_gpus=1, nccl_host_id="node") for host in ("a", "b")
    ]
    with pytest.raises(LaunchError, match="NCCL_HOSTID=node is set on 2 hosts"):
        require_own_gpus(named)
    require_own_gpus([replace(location, nccl_host_id=f"node {location.host}") for location in named])


def variables(text: str) -> dict[str, str]:
    return dict(one.split("=", 1) for one in text.split())
