"""The bandwidth below which a codec pays: one point of equal time, and faster on its one side only."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from weft.plan.partition.wire import sent_bytes
from weft.plan.plan import CODECS
from weft.planning.compression import SAFE_WITH, Advice, Links, advise, links_of, usual_shapes
from weft.profiles.cluster import Compression
from weft.profiles.presets import preset

HALF = Compression(name="half", alpha_s=1e-4, element_ns=0.5, replica_element_ns=0.0)
GATHERED = Compression(name="sign", alpha_s=1e-4, element_ns=0.5, replica_element_ns=0.25)
MLP = [(512, 1024), (512,), (2048, 512), (2048,)]
NUMEL = 512 * 1024 + 512 + 2048 * 512 + 2048
LINKS = Links(num_replicas=4, alpha_s=1e-3)


def test_at_the_break_even_both_take_as_long_and_only_below_it_does_the_codec_pay() -> None:
    advice = advise(HALF, MLP, LINKS)
    point = advice.pays_below_bytes_per_s
    assert 0 < point < math.inf
    assert advice.coded_s(point) == pytest.approx(advice.dense_s(point), rel=1e-12)
    saved = [advice.dense_s(rate) - advice.coded_s(rate) for rate in (point / 100, point / 2, 2 * point, 100 * point)]
    assert saved == sorted(saved, reverse=True) and saved[1] > 0 > saved[2]


def test_the_figures_are_the_closed_forms() -> None:
    advice = advise(HALF, MLP, LINKS)
    # Two buckets, because the first one closes at 1 MiB.
    first, second = 512 * 1024, NUMEL - 512 * 1024
    for sent, item_bytes in ((advice.dense_bytes, 4), (advice.sent_bytes, 2)):
        assert sent == sum(sent_bytes("all-reduce", item_bytes * numel, 4) for numel in (first, second))
    assert advice.dense_latency_s == advice.latency_s == pytest.approx(2 * 6 * LINKS.alpha_s)
    assert advice.codec_s == pytest.approx(2 * HALF.alpha_s + NUMEL * HALF.element_ns * 1e-9)


def test_ranks_of_a_host_share_the_work_and_replicas_add_to_it() -> None:
    alone, shared = (advise(HALF, MLP, replace(LINKS, ranks_per_link=ranks)).codec_s for ranks in (1, 2))
    assert shared - 2 * HALF.alpha_s == pytest.approx((alone - 2 * HALF.alpha_s) / 2)
    times = [GATHERED.time_s(1e6, num_replicas=number) for number in (2, 4, 8)]
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0])) and times[0] < times[1]
    assert HALF.time_s(1e6, num_replicas=2) == HALF.time_s(1e6, num_replicas=64)


def test_a_codec_that_sends_no_less_never_pays_and_one_without_cost_always_does() -> None:
    free = Advice(codec=HALF.codec, dense_bytes=100, sent_bytes=50, dense_latency_s=1.0, latency_s=1.0, codec_s=0.0)
    assert free.pays_below_bytes_per_s == math.inf and free.compression == 2
    assert replace(free, sent_bytes=100, codec_s=1.0).pays_below_bytes_per_s == 0


@pytest.mark.parametrize("count", [1, 1000, 123_457, 25_000_000, 1_000_000_007])
def test_usual_shapes_have_as_many_parameters_as_asked_for(count: int) -> None:
    shapes = usual_shapes(count)
    assert sum(map(math.prod, shapes)) == count and all(dim for shape in shapes for dim in shape)
    assert len(shapes) < 66 or shapes[0] == (1024, 1024)


def test_replicas_are_hosts_or_the_ranks_of_one() -> None:
    hosts, laptop = preset("1gbe"), preset("laptop")
    assert links_of(hosts) == Links(num_replicas=4, ranks_per_link=2, alpha_s=100e-6, bytes_per_s=1.17e8)
    assert links_of(hosts, 16).num_replicas == 16
    assert links_of(laptop) == Links(num_replicas=2, ranks_per_link=1, alpha_s=60e-6, bytes_per_s=None)


def test_every_codec_says_what_it_is_safe_with_and_the_page_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods" / "compression.md").read_text()
    assert SAFE_WITH.keys() == set(CODECS)
    for name, safe_with in SAFE_WITH.items():
        assert re.search(rf"^\| `{name}` \|.*\| {re.escape(safe_with)} \|$", page, re.MULTILINE), name
