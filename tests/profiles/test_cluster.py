"""Clusters as data: closed forms of times, the file's exact round trip, presets, fits, groups to time, slow links."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from reference import cluster_tables

from weft.measure.fit import Line, fit_line
from weft.measure.shapes import Shape, group_shapes, host_pairs
from weft.plan.check import check
from weft.plan.partition.wire import sent_bytes
from weft.profiles.cluster import COLLECTIVES, Cluster, ClusterError, Device, Link, Timing
from weft.profiles.cluster_text import format_cluster, parse_cluster, read_cluster, write_cluster
from weft.profiles.presets import PRESETS, preset
from weft.profiles.slow import slow_links

ROOT = Path(__file__).parents[2]
ALPHA_S, BYTES_PER_S = 2e-4, 1e8


def device(rank: int, host: int = 0) -> Device:
    return Device(
        rank=rank, host=host, kind="cpu", name="a CPU", memory_bytes=1, copy_bytes_per_s=1.0, fp32_flops_per_s=1.0
    )


def network(first: int, second: int, *, alpha_s: float = ALPHA_S, bytes_per_s: float = BYTES_PER_S) -> Link:
    return Link(kind="network", hosts=(first, second), alpha_s=alpha_s, bytes_per_s=bytes_per_s)


def hosts(num_hosts: int, *timings: Timing) -> Cluster:
    """One rank a host, equal links."""
    pairs = [(first, second) for first in range(num_hosts) for second in range(first + 1, num_hosts)]
    return Cluster(
        devices=tuple(device(rank, rank) for rank in range(num_hosts)),
        links=tuple(network(*pair) for pair in pairs),
        timings=timings,
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_times_over_a_bare_link_are_the_closed_forms(num_ranks: int) -> None:
    cluster, size, p = hosts(8), 1e6, num_ranks
    moved_s = size / BYTES_PER_S
    expected = {
        "all-reduce": 2 * (p - 1) * ALPHA_S + 2 * (p - 1) / p * moved_s,
        "reduce-scatter": (p - 1) * ALPHA_S + (p - 1) / p * moved_s,
        "all-gather": (p - 1) * ALPHA_S + (p - 1) / p * moved_s,
        "all-to-all": (p - 1) * ALPHA_S + (p - 1) / p * moved_s,
        "scatter": (p - 1) * ALPHA_S + (p - 1) / p * moved_s,
        "gather": (p - 1) * ALPHA_S + (p - 1) / p * moved_s,
        "broadcast": math.ceil(math.log2(p)) * ALPHA_S + moved_s,
        "reduce": math.ceil(math.log2(p)) * ALPHA_S + moved_s,
        "send": ALPHA_S + moved_s,
    }
    assert expected.keys() == set(COLLECTIVES)
    for collective in COLLECTIVES:
        found = cluster.time_s(collective, size, num_ranks=p, link="network")
        assert found == pytest.approx(expected[collective], rel=1e-9)
        assert cluster.time_s(collective, size, num_ranks=1, link="network") == 0


def test_a_measured_collective_is_read_off_its_own_line_and_scaled_to_other_groups() -> None:
    timing = Timing(collective="all-reduce", link="network", num_ranks=4, alpha_s=6e-3, bytes_per_s=2e6)
    cluster = hosts(8, timing)
    assert cluster.time_s("all-reduce", 1e6, num_ranks=4, link="network") == pytest.approx(6e-3 + 0.5)
    rounds, share = 14 / 6, sent_bytes("all-reduce", 1 << 40, 8) / sent_bytes("all-reduce", 1 << 40, 4)
    eight_s = cluster.time_s("all-reduce", 1e6, num_ranks=8, link="network")
    assert eight_s == pytest.approx(rounds * 6e-3 + share * 0.5)
    assert cluster.time_s("send", 0, num_ranks=2, link="network") == ALPHA_S  # the bare link, which is still there


def test_the_nearest_size_the_faster_transport_and_the_slowest_pair_count() -> None:
    timings = [
        Timing(collective="all-gather", link="network", transport=way, num_ranks=size, alpha_s=alpha_s, bytes_per_s=1e9)
        for way, size, alpha_s in (("c10d", 2, 1.0), ("c10d", 4, 5.0), ("shared", 4, 3.0))
    ]
    cluster = hosts(4, *timings)
    assert cluster.time_s("all-gather", 0, num_ranks=2, link="network") == 1.0
    assert cluster.time_s("all-gather", 0, num_ranks=4, link="network") == 3.0
    slow = replace(cluster, links=(*cluster.links[:-1], network(2, 3, alpha_s=1.0)))
    assert slow.time_s("send", 0, num_ranks=2, link="network") == 1.0


def test_what_a_cluster_does_not_know() -> None:
    cluster = hosts(2)
    with pytest.raises(ClusterError, match='no link of kind "device"; it has "network"'):
        cluster.time_s("send", 1, num_ranks=2, link="device")
    assert cluster.link_between(0, 1) == "network"
    with pytest.raises(ClusterError, match="no link between hosts 0 and 0"):
        cluster.link_between(0, 0)


def test_a_cluster_that_makes_no_sense_is_refused_with_all_problems() -> None:
    timing = Timing(collective="send", link="network", num_ranks=9, alpha_s=0, bytes_per_s=1)
    bad_links = (network(0, 5), replace(network(0, 1), kind="loopback"))
    with pytest.raises(ClusterError) as caught:
        Cluster(devices=(device(1), device(0, 3)), links=bad_links, timings=(timing,))
    text = str(caught.value)
    for told in (
        "ranks [1, 0]",
        "hosts [0, 3]",
        "hosts [0, 5]",
        '"loopback" joins hosts [0, 1]',
        "9 ranks, there are 2",
    ):
        assert told in text
    with pytest.raises(ClusterError):
        Cluster()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_typical_not_measured_and_survive_the_round_trip(name: str) -> None:
    cluster = preset(name)
    assert cluster.name == name and not cluster.measured
    assert parse_cluster(format_cluster(cluster)) == cluster
    kinds = {cluster.link_between(0, rank) for rank in range(1, cluster.num_ranks)}
    assert ("network" in kinds) == (cluster.num_hosts > 1)
    for kind in kinds:
        assert cluster.time_s("all-reduce", 1e6, num_ranks=2, link=kind) > 0
    assert [device.host for device in cluster.devices] == sorted(device.host for device in cluster.devices)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ClusterError, match='did you mean "10gbe"'):
        preset("10gb")


@pytest.mark.parametrize("seed", range(20))
def test_every_cluster_survives_the_round_trip(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    figures = {"alpha_s": draw.random() * 10 ** draw.uniform(-9, 0), "bytes_per_s": 10 ** draw.uniform(3, 12)}
    cluster = Cluster(
        name='a "name"\n',
        measured=draw.random() < 0.5,
        devices=tuple(replace(device(rank), memory_bytes=draw.randint(1, 2**60)) for rank in range(3)),
        links=(Link(kind="shared-memory", transport="shared", miss=draw.random(), **figures),),
        timings=(Timing(collective="broadcast", link="loopback", num_ranks=3, **figures),),
    )
    write_cluster(cluster, tmp_path / "cluster.toml")
    assert read_cluster(tmp_path / "cluster.toml") == cluster
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]


def test_a_bad_text_is_refused_with_all_problems() -> None:
    text = """
[cluster]
measured = "yes"
owner = 1
[[device]]
rank = -1
kind = "tpu"
[[link]]
kind = "network"
hosts = [1, 0]
speed = 3
[[compression]]
name = "topk"
bits = 3
[[timeing]]
"""
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text, source="c.toml")
    found = "\n".join(caught.value.problems)
    assert all(problem.startswith("c.toml: ") for problem in caught.value.problems)
    for told in (
        '[cluster] measured = "yes" must be true or false',
        "[cluster] owner = 1 is not a field",
        "device 0: [device] rank = -1 must be a whole number, at least 0",
        'device 0: [device] kind = "tpu" is not a known value',
        "device 0: memory_bytes is missing",
        "compression 0: [compression] bits = 3 must be 2, 8 or 32",
        "link 0: [link] hosts = [1, 0] must be a list of two host numbers, the lower first",
        "link 0: [link] speed = 3 is not a field of [[link]]",
        "link 0: alpha_s is missing; give a number, at least 0",
        'did you mean "timing"?',
    ):
        assert told in found
    for wrong in ("device = 3", "cluster = 3", "[[device]"):
        with pytest.raises(ClusterError):
            parse_cluster(wrong)


def test_the_page_has_the_generated_fields_and_an_example_that_reads() -> None:
    page = (ROOT / "docs" / "profile.md").read_text()
    assert cluster_tables() in page, "put the output of python docs/reference.py cluster into docs/profile.md"
    examples = re.findall(r"^```\n(\[cluster\].*?)^```", page, re.MULTILINE | re.DOTALL)
    assert examples and all(parse_cluster(example).measured for example in examples)


def test_a_fit_finds_the_line_and_is_not_moved_by_a_disturbed_time() -> None:
    true = Line(alpha_s=3e-4, bytes_per_s=2e9)
    points = [(float(size), true.time_s(size)) for size in (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)]
    exact = fit_line(points)
    assert (exact.alpha_s, exact.bytes_per_s) == pytest.approx((3e-4, 2e9)) and exact.miss < 1e-9
    for place in range(len(points)):
        disturbed = [(size, seconds * (20 if i == place else 1)) for i, (size, seconds) in enumerate(points)]
        line = fit_line(disturbed)
        assert (line.alpha_s, line.bytes_per_s) == pytest.approx((3e-4, 2e9))
        assert line.miss == pytest.approx(19)
    assert fit_line([(100.0, 1.0)]) == Line(alpha_s=0.0, bytes_per_s=100.0)
    assert fit_line([(100.0, 1.0), (200.0, 0.5)]).alpha_s == 0  # falling times: never a negative rate
    with pytest.raises(ValueError, match="no point"):
        fit_line([])


def test_groups_worth_timing() -> None:
    def shape(replicate: int, data: int, axis: str, between_hosts: bool) -> Shape:
        return Shape(replicate=replicate, data=data, axis=axis, between_hosts=between_hosts)

    assert group_shapes((0,)) == ()
    assert group_shapes((0, 0)) == (shape(1, 2, "data", False),)
    assert group_shapes((0, 0, 0, 0)) == (shape(2, 2, "data", False), shape(1, 4, "data", False))
    assert group_shapes((0, 1, 2)) == (shape(1, 3, "data", True),)
    both = group_shapes((0, 0, 1, 1))
    assert both == (shape(2, 2, "data", False), shape(2, 2, "replicate", True), shape(1, 4, "data", True))
    assert [each.num_ranks for each in both] == [2, 2, 4]
    for uneven in ((0, 0, 1), (0, 1, 0, 1)):
        assert group_shapes(uneven) == (shape(1, len(uneven), "data", True),)
    for each in (*both, *group_shapes((0,) * 12)):
        for transport in ("c10d", "shared"):
            plan = each.plan(transport)
            assert check(plan, num_ranks=plan.axes.num_ranks) == []


def test_pairs_of_hosts_are_measured_once() -> None:
    assert host_pairs((0, 0, 1, 1, 2)) == ((0, 2), (0, 4), (2, 4), (0, 1), (2, 3))
    assert host_pairs((0,)) == ()


def test_the_slow_link_is_named() -> None:
    equal = hosts(4).links
    assert slow_links(equal) == [] and slow_links(equal[:1]) == []
    found = slow_links((*equal[:4], network(1, 3, bytes_per_s=BYTES_PER_S / 5), equal[5]))
    assert [slow.link.hosts for slow in found] == [(1, 3)]
    assert found[0].times == pytest.approx(4.9, abs=0.1) and "hosts 1 and 3 is slow" in str(found[0])
    three = (network(0, 1), network(0, 2, alpha_s=0.1), network(1, 2, alpha_s=0.1))
    assert {slow.link.hosts for slow in slow_links(three)} == {(0, 2), (1, 2)}
