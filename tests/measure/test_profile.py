"""A profile of the ranks of a test, also when they pretend to be on several hosts, and the comparison of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import data_group
from ranks import ranks

from weft.measure.cluster import Effort, measure_cluster
from weft.measure.device import can_multiply, measure_speeds
from weft.measure.exchanges import TIMED
from weft.measure.fingerprints import MISSING, WHOLE_BYTES, hash_code, hash_file, hash_job
from weft.measure.interfaces import addresses, advice, offered
from weft.measure.preflight import clock_skews, collect, compare, run_preflight, say_ranks
from weft.measure.timing import agree_as_pair, agree_in_group, time_sizes
from weft.profiles.cluster_text import format_cluster, parse_cluster
from weft.world import join_world

TINY = Effort(sizes=(1 << 10, 1 << 14), total_s=20.0, part_s=0.01, device_s=0.04)


def silent(done: int, total: int, label: str) -> None:
    assert 0 <= done <= total and label


@ranks(2)
def test_one_host_has_both_links_and_every_collective() -> None:
    world = join_world("cpu")
    cluster, notes = measure_cluster(world, effort=TINY, progress=silent)
    assert not [note for note in notes if "used up" in note]
    assert cluster.measured and (cluster.num_ranks, cluster.num_hosts) == (2, 1)
    assert [(link.kind, link.transport, link.hosts) for link in cluster.links] == [
        ("loopback", "c10d", (0, 0)),
        ("shared-memory", "shared", (0, 0)),
    ]
    assert {(each.collective, each.link, each.num_ranks) for each in cluster.timings} == {
        (collective, link, 2) for collective in TIMED for link in ("loopback", "shared-memory")
    }
    assert parse_cluster(format_cluster(cluster)) == cluster
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, cluster)
    assert everyones == [cluster, cluster]


@pytest.mark.long
@ranks(4)
def test_several_hosts_are_measured_pair_by_pair() -> None:
    world = replace(join_world("cpu"), hosts=(0, 0, 1, 1))
    labels = []
    cluster, _ = measure_cluster(world, effort=TINY, progress=lambda done, total, label: labels.append(label))
    assert cluster.num_hosts == 2 and [device.host for device in cluster.devices] == [0, 0, 1, 1]
    assert {(link.kind, link.hosts) for link in cluster.links} == {
        ("loopback", (0, 0)),
        ("shared-memory", (0, 0)),
        ("loopback", (1, 1)),
        ("shared-memory", (1, 1)),
        ("network", (0, 1)),
    }
    groups = {(each.link, each.transport, each.num_ranks) for each in cluster.timings}
    assert groups == {
        ("loopback", "c10d", 2),
        ("shared-memory", "shared", 2),
        ("network", "c10d", 2),
        ("network", "c10d", 4),
        ("network", "shared", 4),  # in two levels
    }
    assert labels[0] == "devices" and labels[-1] == "done" and "network between hosts 0 and 1" in labels


@ranks(2)
def test_what_there_is_no_time_for_is_named() -> None:
    cluster, notes = measure_cluster(join_world("cpu"), effort=replace(TINY, total_s=0.0), progress=silent)
    assert cluster.num_ranks == 2 and cluster.links == () == cluster.timings
    assert len(notes) == 1 and notes[0].count(";") == 2 * (1 + len(TIMED)) - 1


def test_one_process_has_a_device_and_no_links() -> None:
    cluster, notes = measure_cluster(join_world("cpu"), effort=TINY, progress=silent)
    assert (cluster.num_ranks, cluster.links, cluster.timings, notes) == (1, (), (), [])
    assert cluster.devices[0].kind == "cpu" and cluster.devices[0].memory_bytes > 1 << 20


@ranks(2)
def test_sizes_that_would_take_too_long_are_left_out() -> None:
    group = data_group("control")
    # Ranks differ in how long they take; what they decide must not.
    num_rows = 2000 if dist.get_rank() == 1 else 1

    def make(size: int) -> Callable[[], None]:
        assert size < 1 << 40

        def run() -> None:
            torch.ones(num_rows * size, 200).sum()

        return run

    for agreement in (agree_in_group(group), agree_as_pair(group, 1 - dist.get_rank())):
        for chained in (True, False):
            points = time_sizes(make, (1, 2, 3, 1 << 40), agreement, budget_s=1e-3, chained=chained)
            assert [size for size, _ in points] == [1, 2, 3] and all(seconds > 0 for _, seconds in points)
            everyones: list[Any] = [None, None]
            dist.all_gather_object(everyones, points)
            assert everyones == [points, points]


def test_a_dtype_that_ends_a_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    real = torch.mm

    def refuse(left: torch.Tensor, right: torch.Tensor, **out: Any) -> torch.Tensor:
        if left.dtype == torch.bfloat16:
            raise SystemExit(132)
        return real(left, right, **out)

    monkeypatch.setattr(torch, "mm", refuse)
    assert not can_multiply(torch.bfloat16, cpu) and can_multiply(torch.float16, cpu)
    speeds = measure_speeds(cpu, budget_s=0.02, meet=lambda: None)
    assert speeds.keys() == {"copy_bytes_per_s", "fp32_flops_per_s", "fp16_flops_per_s"}
    assert all(speed > 0 for speed in speeds.values())


@ranks(3)
def test_ranks_of_one_host_differ_in_nothing_that_matters() -> None:
    world = join_world("cpu")
    found = run_preflight(world, data_group("preflight", world=world))
    assert found.ok and len(found.facts) == 3


@ranks(3)
def test_clocks_of_one_machine_agree() -> None:
    world = replace(join_world("cpu"), hosts=(0, 0, 1))
    skews = clock_skews(world, data_group("clocks", world=world))
    assert skews.keys() == {1}
    offset_s, doubt_s = skews[1]
    assert abs(offset_s) <= doubt_s + 1e-6


def test_what_differs_is_named_with_ranks_and_values() -> None:
    facts = [collect(join_world("cpu"), None) for _ in range(4)]
    facts[2]["same"]["torch"] = "2.11.0"
    facts[1]["same"]["data big.bin"] = "abc"
    facts[3]["alike"]["threads"] = "16"
    facts[0]["amounts"]["free disk"] = 10 * facts[1]["amounts"]["free disk"]
    facts[0]["problems"] = facts[1]["problems"] = ("job.toml: cannot be read: gone",)
    findings = compare(facts)
    broken = [finding.text for finding in findings if finding.breaks]
    notes = [finding.text for finding in findings if not finding.breaks]
    assert broken[0] == "job.toml: cannot be read: gone (ranks 0 and 1)"
    assert f"torch differs: {torch.__version__} on ranks 0, 1 and 3, 2.11.0 on rank 2; make them equal" in broken
    assert any(text.startswith("data big.bin differs: missing on ranks 0, 2 and 3, abc on rank 1") for text in broken)
    assert len(broken) == 3
    assert any(text.startswith("threads differs: ") and text.endswith("16 on rank 3") for text in notes)
    assert any(text.startswith("free disk is uneven: ") and text.endswith("on rank 0") for text in notes)
    assert say_ranks([4, 5, 6]) == "ranks 4 to 6" and say_ranks([4, 5]) == "ranks 4 and 5"


def test_hashes_see_a_change_and_large_files_are_sampled(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"weft")
    first = hash_file(small)
    small.write_bytes(b"warp")
    assert hash_file(small) != first and hash_file(tmp_path / "none") == MISSING
    with large.open("wb") as file:
        file.truncate(WHOLE_BYTES + 1)  # a hole: it takes no room
    sampled = hash_file(large)
    with large.open("r+b") as file:
        file.seek(WHOLE_BYTES)
        file.write(b"x")
    assert hash_file(large) != sampled
    assert hash_code() == hash_code()


def test_a_job_is_hashed_with_its_plan_its_modules_and_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def model(): ...\n")
    (tmp_path / "a.txt").write_text("a")
    job = tmp_path / "job.toml"
    job.write_text(
        'plan = "p.toml"\n[model]\nname = "own:model"\n[dataset]\nname = "text"\nfiles = ["*.txt", "b.bin"]\n'
    )
    hashes = hash_job(job)
    assert hashes.keys() == {"job job.toml", "plan p.toml", "module own", "data a.txt", "data b.bin"}
    assert hashes["plan p.toml"] == hashes["data b.bin"] == MISSING != hashes["module own"]
    job.write_text('[model]\nname = "own:model"\n[dataset]\nname = "nothing"\n')
    assert "is not known" in hash_job(job)["data (sampled)"]


def test_the_address_that_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses().get("lo", "127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert offered() == ("nosuch0", "?")
    assert advice().startswith("this rank offers ? (interface nosuch0)")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert offered()[1].count(".") == 3
