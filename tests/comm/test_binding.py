"""Which GPUs ranks are bound to: what is refused, with which words, and what is prepared for ranks that share one."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import weft.world
from weft.comm.world.binding import (
    SHARE_GPUS,
    RankLocation,
    exchange_locations,
    needless_sharing_warning,
    prepare_sharing,
    ranks_on_device,
    require_own_gpus,
    slow_backend_warning,
)
from weft.errors import LaunchError


def locations(gpus: str, *, hosts: str = "", num_gpus: int = 1) -> list[RankLocation]:
    """One rank per letter: its GPU, and its host."""
    places = zip(gpus, hosts or "h" * len(gpus), strict=True)
    return [RankLocation(host=host, device="cuda:0", gpu_uuid=f"GPU-{gpu}", num_gpus=num_gpus) for gpu, host in places]


def test_one_visible_gpu_per_rank_is_no_shared_gpu() -> None:
    require_own_gpus(locations("abcd", num_gpus=1))


def test_ranks_that_share_a_memory_are_counted_by_gpus_not_by_what_each_sees() -> None:
    assert [ranks_on_device(locations("abac", num_gpus=1), rank) for rank in range(4)] == [2, 1, 2, 1]
    assert ranks_on_device(locations("aa", hosts="xy"), 0) == 1
    hosts = [RankLocation(host=host, device="cpu") for host in "xxy"]
    assert [ranks_on_device(hosts, rank) for rank in range(3)] == [2, 2, 1]


def test_the_same_gpu_number_on_another_host_is_another_gpu() -> None:
    require_own_gpus(locations("aa", hosts="xy"))


def test_more_ranks_than_gpus_says_both_numbers_and_how_to_go_on() -> None:
    words = r"ranks 0 to 2 use the same GPU \(GPU-a\).* 3 ranks and 1 GPU; start 1"
    with pytest.raises(LaunchError, match=words) as found:
        require_own_gpus(locations("aaa"))
    assert SHARE_GPUS in str(found.value)


def test_ranks_bound_to_one_gpu_of_several_are_told_apart_from_too_many_ranks() -> None:
    words = r"ranks 0, 2 use the same GPU .* although their host has 4: leave `device` out"
    with pytest.raises(LaunchError, match=words):
        require_own_gpus(locations("abac", num_gpus=4))


def test_every_shared_gpu_is_told_at_once() -> None:
    with pytest.raises(LaunchError) as found:
        require_own_gpus(locations("aabb", num_gpus=2))
    assert len(found.value.problems) == 2


def test_ranks_that_nccl_takes_for_hosts_of_their_own_may_share() -> None:
    shared = [replace(location, nccl_host_id=f"rank{rank}") for rank, location in enumerate(locations("aa"))]
    require_own_gpus(shared)
    with pytest.raises(LaunchError, match="use the same GPU"):
        require_own_gpus([replace(location, nccl_host_id="one") for location in shared])


def test_containers_of_one_machine_may_share_its_name_for_nccl_but_no_gpu() -> None:
    """A host is a kernel with its namespaces: two containers are two hosts, and NCCL_HOSTID joins them on purpose."""
    inside = [
        RankLocation(
            host=f"boot/net{place}/pid{place}", device="cuda:0", gpu_uuid=f"GPU-{gpu}", num_gpus=1, nccl_host_id=name
        )
        for place, (gpu, name) in enumerate([("a", "node"), ("b", "node"), ("b", None)])
    ]
    require_own_gpus(inside[:2])
    with pytest.raises(LaunchError, match="ranks 0, 1 use the same GPU"):
        require_own_gpus(inside[1:])
    with pytest.raises(LaunchError, match="NCCL_HOSTID=node is set on 2 hosts"):
        require_own_gpus([inside[0], replace(inside[1], host="other/net/pid")])


def test_sharing_that_nobody_needs_is_warned_of() -> None:
    assert "without NVLink" in str(needless_sharing_warning(locations("ab"), {SHARE_GPUS: "1"}))
    assert needless_sharing_warning(locations("aa"), {SHARE_GPUS: "1"}) is None
    assert needless_sharing_warning(locations("ab"), {}) is None
    without_launcher = {SHARE_GPUS: "1"}
    prepare_sharing(0, without_launcher)
    assert "NCCL_SOCKET_IFNAME" not in without_launcher, "ranks may be on several hosts"


def test_a_rank_without_a_gpu_among_others_is_named() -> None:
    with pytest.raises(LaunchError, match=r"ranks 0, 1 on cuda; rank 2 on cpu"):
        require_own_gpus([*locations("ab"), RankLocation(host="h", device="cpu")])


def test_sharing_is_prepared_only_if_asked_for() -> None:
    environment = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    prepare_sharing(1, environment)
    assert "NCCL_HOSTID" not in environment
    environment[SHARE_GPUS] = "1"
    prepare_sharing(1, environment)
    assert environment["NCCL_HOSTID"] == "weft-rank-1" and environment["NCCL_SOCKET_IFNAME"] == "lo"
    of_several_hosts = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", SHARE_GPUS: "1"}
    prepare_sharing(3, of_several_hosts)
    assert "NCCL_SOCKET_IFNAME" not in of_several_hosts


def test_a_group_that_is_bound_to_a_gpu_decides_over_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The communicator of a group made with `device_id` is on that GPU, whatever a launcher counts."""
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    monkeypatch.setattr(
        weft.world, "dist", SimpleNamespace(is_initialized=lambda: True, group=SimpleNamespace(WORLD=world))
    )
    assert weft.world.choose_device("cuda", 0) == torch.device("cuda", 3)
    assert weft.world.choose_device("cuda:1", 0) == torch.device("cuda", 1)


def test_gpus_over_gloo_are_warned_of_and_nothing_else() -> None:
    assert "gloo" in str(slow_backend_warning(locations("ab"), "gloo"))
    assert slow_backend_warning(locations("ab"), "nccl") is None
    assert slow_backend_warning([RankLocation(host="h", device="cpu")], "gloo") is None


def _join_twice(path: str, rank: int, results: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    store = dist.FileStore(path, 2)
    for time in ("first", "second"):
        found = exchange_locations(store, rank, 2, RankLocation(host=f"{time} of {rank}", device="cpu"))
        results.put((rank, [location.host for location in found]))


def test_locations_travel_through_the_store_also_a_second_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue = context.Queue()  # type: ignore[type-arg]
    ranks = [context.Process(target=_join_twice, args=(str(tmp_path / "store"), rank, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    told = [results.get(timeout=30) for _ in range(4)]
    for process in ranks:
        process.join(30)
    for rank in range(2):
        mine = [hosts for one, hosts in told if one == rank]
        assert mine == [["first of 0", "first of 1"], ["second of 0", "second of 1"]]
