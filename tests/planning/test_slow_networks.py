"""Methods on a slow network: hand-computed steps, orderings that must hold, and plans that can run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from slow_cluster import slow_cluster

from weft.errors import ClusterError
from weft.measure.codecs import MEASURED as TIMED_CODECS
from weft.plan.check import check
from weft.plan.plan import Data
from weft.plan.text import format_plan, parse_plan
from weft.planning.compression import describe, usual_shapes
from weft.planning.extra_steps import KNOWN, LONGEST_STREAMING_DELAY, UNKNOWN_MARGIN, extra_steps
from weft.planning.network import Network, network_of, uniform_network
from weft.planning.slow_networks import DELAYS, Prediction, Workload, _replicas, late_step_s, predict
from weft.profiles.presets import preset

COMPRESSIONS = slow_cluster().compressions
SQUARES = ((512, 512),) * 4
"""4 MiB of weights; gradients are in two buckets, because the first one closes at 1 MiB."""
SENT = 1.5 * 4 * (1 << 20)
"""Bytes that each of 4 replicas sends to exchange them."""
MODEL = Workload(shapes=tuple(usual_shapes(25_000_000)), compute_s=0.5, compressions=COMPRESSIONS)
GBIT = 125e6


def links(bytes_per_s: float, latency_s: float, **others: int) -> Network:
    return uniform_network(num_replicas=4, bytes_per_s=bytes_per_s, latency_s=latency_s, **others)


def by_key(predictions: list[Prediction]) -> dict[tuple[str, str, str], Prediction]:
    return {(one.method, describe(one.plan.codec), one.plan.precision.reduce): one for one in predictions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The first of the ranking, and the first of those that give up less."""

    lossless: Prediction
    """Gives the results of one process."""
    no_more_steps: Prediction
    """Needs no more steps than that, measured or between measured settings."""
    overall: Prediction
    """The best of all."""


def best(workload: Workload, network: Network) -> Best:
    ranked = predict(workload, network)
    return Best(
        lossless=next(one for one in ranked if one.name == "all-reduce"),
        no_more_steps=next(one for one in ranked if one.extra.confidence != "unknown" and one.extra.factor <= 1),
        overall=ranked[0],
    )


def plain(workload: Workload, network: Network) -> dict[str, Prediction]:
    return {one.method: one for one in predict(replace(workload, compressions=()), network)}


# The formulas.


def test_steps_are_those_computed_by_hand() -> None:
    """W = 4: a ring is 6 rounds of 2 latencies, a direct exchange 2 of them, or 4 in two phases."""
    found = plain(Workload(shapes=SQUARES, compute_s=3.0, optimizer="sgd"), links(1e6, 0.1))
    sent_s = SENT / 1e6  # 6.29
    assert found["all-reduce"].step_s == pytest.approx(3 / 3 + 1.2 + sent_s)  # 2 of 3 s are behind the backward pass
    assert found["all-reduce"].hidden_s == pytest.approx(2)
    assert found["local"].step_s == pytest.approx(3 + (1.2 + sent_s) / 10)
    assert found["diloco"].step_s == pytest.approx(3 + (1.2 + sent_s) / 20)
    delayed = found["delayed"]
    # 6.29 s fit into 3 steps, and with the latency of two rounds 6.69 s into 2 phases of 2 steps.
    assert (delayed.plan.data.every, delayed.plan.data.delay) == (3, 4)
    assert delayed.step_s == 3 and delayed.hidden_s == pytest.approx((0.4 + sent_s) / 3)
    streaming = found["streaming"]
    assert streaming.plan.data.delay == 1 and streaming.step_s == 3  # 1.57 s of a fragment and a ring's 1.2 s
    assert streaming.hidden_s == pytest.approx((4 * 1.2 + sent_s) / 20)


def test_what_travels_in_one_phase_has_the_whole_delay() -> None:
    """A bias travels as it is, in two phases; the 1-bit message of the matrix in one, with all bytes before it."""
    matrix, bias = 512 * 512, 64
    timed = replace(next(one for one in COMPRESSIONS if one.codec.name == "onebit"), alpha_s=0.0)
    timed = replace(timed, element_ns=0.0, replica_element_ns=0.0)
    workload = Workload(shapes=((512, 512), (bias,)), compute_s=1.0, compressions=(timed,))
    data = Data(sync="delayed", every=3, delay=3)
    message = matrix / 8 + 2 * 512 * 4  # a sign per weight, and two scales per row
    sent = 3 * message + 1.5 * 4 * bias
    for rate, latency_s in ((sent / 2.5, 0.2), (1e9, 0.7)):
        found = _replicas(workload, links(rate, latency_s), timed)
        assert [one.num_phases for one in found.late_parts] == [1, 2]
        # 2.9 s in one phase fit into 3 steps; of 2.8 s in two phases 2 steps hide 2, so 3 steps wait for 0.8.
        expected = 1.0 if latency_s == 0.2 else 1 + 0.8 / 3
        assert found.step_s(data) == pytest.approx(expected, rel=1e-3)


def test_what_cannot_be_hidden_is_waited_for() -> None:
    found = plain(Workload(shapes=SQUARES, compute_s=0.01, optimizer="sgd"), links(1e9, 0.5))
    assert found["delayed"].plan.data.delay == max(DELAYS)
    assert found["delayed"].step_s == pytest.approx((2 * 2 * 0.5 + SENT / 1e9) / max(DELAYS))
    assert found["all-reduce"].step_s == pytest.approx(0.01 / 3 + 6 * 2 * 0.5 + SENT / 1e9, rel=1e-2)


def test_a_late_exchange_is_waited_for_as_far_as_it_is_not_over() -> None:
    def step_s(spacing: float, delay: int) -> float:
        return late_step_s(1.0, 4.0, 2.0, spacing=spacing, delay=delay)

    assert step_s(10, 0) == pytest.approx(1 + 6 / 10)
    assert step_s(10, 2) == pytest.approx(1 + 4 / 10)  # once per exchange
    assert step_s(1, 2) == pytest.approx(6 / 2)  # two are under way
    assert step_s(1, 6) == pytest.approx(2)  # the link has 2 s for each step
    assert step_s(2, 6) == step_s(10, 6) == 1


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for network in (links(GBIT / 10, 0.05), network_of(slow_cluster()), links(GBIT, 0.0), links(1e4, 1.0)):
        for one in predict(MODEL, network):
            parts = one.compute_s + one.codec_s + one.latency_s + one.bandwidth_s - one.hidden_s
            assert one.step_s == pytest.approx(parts) and one.step_s >= one.compute_s, one.name


def test_dense_is_what_the_measured_all_reduce_takes() -> None:
    cluster = slow_cluster()
    workload = Workload(shapes=((512, 512),), compute_s=1e-9)  # one bucket
    found = plain(workload, network_of(cluster))["all-reduce"]
    timed_s = cluster.time_s("all-reduce", 4 * 512 * 512, num_ranks=4, link="network")
    assert found.latency_s + found.bandwidth_s == pytest.approx(timed_s, rel=1e-9)
    assert found.step_s == pytest.approx(timed_s, rel=1e-6)


def test_bytes_and_memory_are_those_of_the_plan() -> None:
    found = by_key(predict(replace(MODEL, shapes=SQUARES), links(GBIT, 0.01)))
    dense, tail = found["all-reduce", "none", "fp32"], 1.5 * 8 * 8  # every replica's two words, in float64
    assert dense.sent_bytes == SENT and dense.kept_bytes == 0
    assert found["local", "none", "fp32"].sent_bytes == (SENT + tail) / 10
    assert found["streaming", "none", "fp32"].sent_bytes == pytest.approx(SENT / 20, rel=1e-3)  # and four tails
    assert found["all-reduce", "none", "bf16"].sent_bytes == SENT / 2
    assert found["diloco", "none", "fp32"].kept_bytes == 3 * (4 << 20)  # anchor, momentum, and what is sent
    assert found["all-reduce", "topk 0.01", "fp32"].kept_bytes == 2 * (4 << 20)


def test_ranks_of_a_host_share_codec_time_and_memory() -> None:
    alone, shared = (by_key(predict(MODEL, links(GBIT, 0.01, ranks_per_link=ranks))) for ranks in (1, 2))
    for key in (("all-reduce", "onebit", "fp32"), ("local", "onebit", "fp32")):
        assert shared[key].codec_s == pytest.approx(alone[key].codec_s / 2)
        assert shared[key].kept_bytes == pytest.approx(alone[key].kept_bytes / 2, rel=1e-6)
        assert shared[key].bandwidth_s == alone[key].bandwidth_s


# Orderings.


@pytest.mark.parametrize("optimizer", ["adaptive", "sgd"])
def test_where_exchanges_are_free_synchronous_training_is_best(optimizer: str) -> None:
    found = best(replace(MODEL, optimizer=optimizer), links(math.inf, 0.0))  # type: ignore[arg-type]
    assert found.overall is found.lossless is found.no_more_steps
    assert found.overall.name == "all-reduce" and found.overall.step_s == MODEL.compute_s


@pytest.mark.parametrize("latency_s", [0.05, 0.2, 0.5])
def test_latency_alone_is_hidden_by_a_delay_and_not_by_a_codec(latency_s: float) -> None:
    found = by_key(predict(MODEL, links(math.inf, latency_s)))
    delayed, dense = found["delayed", "none", "fp32"], found["all-reduce", "none", "fp32"]
    assert delayed.step_s == MODEL.compute_s < dense.step_s and delayed.plan.data.every == 1
    assert dense.step_s < found["all-reduce", "powersgd, rank 4", "fp32"].step_s  # twice as many messages
    assert delayed.step_s < found["local", "none", "fp32"].step_s
    assert best(MODEL, links(math.inf, latency_s)).overall.method == "delayed"


@pytest.mark.parametrize("optimizer", ["adaptive", "sgd"])
def test_scarce_bandwidth_wants_fewer_bytes(optimizer: str) -> None:
    workload = replace(MODEL, optimizer=optimizer)  # type: ignore[arg-type]
    found = best(workload, links(1e5, 0.0))
    assert found.overall.plan.codec.name != "none" or found.overall.plan.data.every > 1
    assert found.overall.ranked_s < found.lossless.step_s / 10 and found.overall.sent_bytes < SENT / 4
    assert found.no_more_steps.ranked_s <= found.lossless.ranked_s


def test_the_longer_a_step_computes_the_less_a_relaxed_method_gains() -> None:
    gains = []
    for compute_s in (0.01, 0.1, 1.0, 10.0, 100.0):
        found = best(replace(MODEL, compute_s=compute_s), network_of(slow_cluster()))
        gains.append(found.lossless.step_s / found.overall.ranked_s)
    assert gains == sorted(gains, reverse=True) and gains[0] > 10 and gains[-1] == 1


@pytest.mark.parametrize("latency_s", [0.0, 0.02, 0.3])
def test_more_bandwidth_or_less_latency_never_makes_a_step_longer(latency_s: float) -> None:
    rates = [1e5, 1e6, 1e7, 1e8, math.inf]
    by_rate = [by_key(predict(MODEL, links(rate, latency_s))) for rate in rates]
    by_latency = [by_key(predict(MODEL, links(1e7, factor * latency_s))) for factor in (4, 2, 1)]
    for key in by_rate[0]:
        for found in (by_rate, by_latency):
            # With a delay, a step may wait a little where a longer one would need more steps.
            is_late = key[0] in ("delayed", "streaming")
            steps = [one[key].ranked_s if is_late else one[key].step_s for one in found]
            assert all(later <= sooner * (1 + 1e-9) for sooner, later in itertools.pairwise(steps)), (key, steps)


def test_what_is_unknown_is_advised_only_where_it_is_clearly_faster() -> None:
    are_known = set()
    for rate, latency_s in itertools.product((1e5, 1e6, 1e7, 1e8, 1e9), (0.0, 0.01, 0.1)):
        ranked = predict(MODEL, links(rate, latency_s))
        known_s = min(one.same_loss_s for one in ranked if one.extra.confidence != "unknown")
        are_known.add(ranked[0].extra.confidence != "unknown")
        if ranked[0].extra.confidence == "unknown":
            assert ranked[0].same_loss_s * UNKNOWN_MARGIN <= known_s
    assert True in are_known


def test_a_delay_is_no_longer_than_its_steps_are_known_unless_it_is_clearly_faster() -> None:
    for latency_s in (0.1, 0.5, 1.0, 2.0):
        found = plain(MODEL, links(math.inf, latency_s))["streaming"]
        delay = found.plan.data.delay
        assert isinstance(delay, int)
        assert (found.extra.confidence == "unknown") == (delay > LONGEST_STREAMING_DELAY)
    # 4 s of two phases are hidden by 8 steps; by 4 of them half, which 5 steps between fragments wait for.
    assert plain(MODEL, links(math.inf, 1.0))["streaming"].plan.data.delay == 8


# Plans.


@pytest.mark.parametrize("ranks_per_link", [1, 2])
@pytest.mark.parametrize(("rate", "latency_s"), [(1e5, 0.3), (1e7, 0.05), (1e10, 0.0)])
def test_every_plan_can_run_and_reads_back(ranks_per_link: int, rate: float, latency_s: float) -> None:
    for one in predict(MODEL, links(rate, latency_s, ranks_per_link=ranks_per_link)):
        assert check(one.plan, num_ranks=4 * ranks_per_link) == [], one.name
        assert parse_plan(format_plan(one.plan)) == one.plan
        if ranks_per_link > 1 and one.method != "all-reduce":
            assert one.plan.num_replicas == 4


def test_methods_are_those_with_the_codecs_that_were_timed() -> None:
    found = by_key(predict(MODEL, links(GBIT, 0.01)))
    codecs = {kind: {codec for of, codec, _ in found if of == kind} for kind, _, _ in found}
    between = {"none", "half", "onebit"}
    assert codecs["local"] == codecs["diloco"] == between | {"topk 0.01, 2 bits"}
    assert codecs["delayed"] == between | {"topk 0.03, 2 bits"}
    assert codecs["streaming"] == {"none", "onebit"}
    timed = {describe(codec) for codec in TIMED_CODECS} - {"half"}
    assert codecs["all-reduce"] == timed | {"none"}
    few = by_key(predict(replace(MODEL, compressions=()), links(GBIT, 0.01)))
    assert {codec for _, codec, _ in few} == {"none"}


@pytest.mark.parametrize(("num_blocks", "fragments"), [(None, 4), (0, None), (1, None), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_streaming_has_no_more_fragments_than_the_model_has_blocks(
    num_blocks: int | None, fragments: int | None
) -> None:
    found = plain(replace(MODEL, num_blocks=num_blocks), links(GBIT, 0.01))
    assert (found["streaming"].plan.data.fragments if "streaming" in found else None) == fragments
    if fragments in (2, 3):
        assert found["streaming"].extra.confidence == "between"
        assert found["streaming"].extra.finding.endswith(", in 4 fragments")


def test_codecs_that_would_compress_no_tensor_are_left_out() -> None:
    def codecs(*shapes: tuple[int, ...]) -> set[str]:
        return {codec for _, codec, _ in by_key(predict(replace(MODEL, shapes=shapes), links(GBIT, 0.01)))}

    two_rows = codecs((64,), (2, 4096))
    assert not {"onebit", "powersgd, rank 4"} & two_rows and {"none", "topk 0.01"} <= two_rows
    assert codecs((4096,)) == {"none", "half"}


def test_delayed_averaging_has_the_topk_with_which_it_was_run() -> None:
    decoded = tuple(replace(one, replica_element_ns=0.5) for one in COMPRESSIONS)
    far = predict(replace(MODEL, compressions=decoded), links(1e10, 0.35))
    sparse = {one.method: one for one in far if one.plan.codec.name == "topk" and one.plan.codec.bits == 2}
    delayed, local = sparse["delayed"], sparse["local"]
    assert delayed.plan.codec == replace(local.plan.codec, density=0.03) and delayed.plan.codec.memory == 0.95
    timed = next(one for one in decoded if (one.name, one.bits) == ("topk", 2))
    each_ns = (timed.element_ns + 4 * 0.5, timed.element_ns + 4 * 0.5 * 3)  # three times as many entries to decode
    assert delayed.codec_s * delayed.plan.data.every / (local.codec_s * 10) == pytest.approx(each_ns[1] / each_ns[0])
    assert delayed.extra.confidence == "between"


# What a method's steps are worth.


def test_the_table_names_codecs_as_they_are_described_and_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    known = {describe(codec) for codec in TIMED_CODECS} | {"", "bf16"}
    for (_, _, codec), entry in KNOWN.items():
        assert codec in known
        assert (root / entry.source).is_file() and entry.factor >= 1


def test_a_codec_that_was_not_measured_takes_its_method_alone() -> None:
    outer = KNOWN["adaptive", "diloco", ""]
    half = extra_steps("adaptive", "diloco", "half")
    assert (half.factor, half.confidence, half.ranking_factor) == (outer.factor, "unknown", 1.5 * outer.factor)
    assert half.finding == "not measured; without the codec " + outer.finding
    assert extra_steps("adaptive", "diloco", "") is outer
    assert extra_steps("sgd", "all-reduce", "bf16").confidence == "unknown"
    assert extra_steps("adaptive", "all-reduce", "topk 0.01").confidence == "unknown"


def test_delayed_averaging_needs_more_steps_the_more_its_replicas_differ() -> None:
    def factor(every: int, delay: int, codec: str = "") -> float:
        return extra_steps("adaptive", "delayed", codec, every=every, delay=delay).factor

    assert factor(1, 4) == pytest.approx(1.09) and factor(2, 4) == pytest.approx(1.11) == factor(2, 4, "onebit")
    assert factor(1, 2) == pytest.approx(1.045) and factor(5, 5) == pytest.approx(1.34)
    factors = [factor(1, delay) for delay in range(1, 20)]
    assert factors == sorted(factors)


def test_only_what_was_run_is_measured() -> None:
    def known(codec: str, every: int, delay: int, optimizer: str = "adaptive") -> tuple[str, str]:
        found = extra_steps(optimizer, "delayed", codec, every=every, delay=delay)  # type: ignore[arg-type]
        return found.confidence, found.finding

    assert known("", 1, 4) == ("measured", "1.06 to 1.11 × the steps to a loss, delay 4 (byte GPT, AdamW)")
    assert (
        known("topk 0.03, 2 bits", 1, 4)[0] == known("onebit", 5, 5)[0] == "measured"
        and known("", 5, 5)[0] == "between"
    )
    assert known("", 1, 2) == ("between", "about 1.04 × the steps (between measured points; byte GPT, AdamW)")
    for codec in ("half", "topk 0.01, 2 bits"):
        confidence, finding = known(codec, 1, 4)
        assert confidence == "unknown" and finding.startswith("not measured; without the codec about 1.09 ×")
    # topk was run with 4 steps between sending and merging, and with no more.
    assert known("topk 0.03, 2 bits", 1, 3)[0] == "between" and known("topk 0.03, 2 bits", 2, 4)[0] == "unknown"
    assert known("topk 0.03, 2 bits", 2, 4)[1].startswith("not measured with the codec where replicas differ by more ")
    assert known("", 1, 5, "sgd")[0] == "measured" and known("", 1, 6, "sgd")[0] == "between"
    assert known("", 2, 6, "sgd")[0] == "unknown"  # with SGD it was run after every step


def test_nothing_is_known_beyond_the_runs() -> None:
    beyond = extra_steps("adaptive", "delayed", "", delay=20)
    assert (beyond.factor, beyond.confidence) == (math.inf, "unknown")
    assert beyond.finding == "not measured where replicas differ by more than 19 steps"
    streaming = [extra_steps("adaptive", "streaming", "onebit", delay=delay) for delay in (4, 1, 8, 9)]
    assert [one.confidence for one in streaming] == ["measured", "between", "between", "unknown"]
    assert {one.factor for one in streaming} == {1.38}


# What is between replicas.


def test_a_network_is_what_was_measured() -> None:
    found = network_of(slow_cluster())
    assert (found.num_replicas, found.ranks_per_link, found.latency_s) == (4, 1, 0.0252)
    assert found.ring.latency_s == 0.3033 and found.direct.latency_s == pytest.approx((0.0511 + 0.0503) / 2)
    assert found.ring.bytes_per_s == pytest.approx(1.5 * 9.72e6)
    byte_s = (1 / (0.75 * 10.295e6) + 1 / (0.75 * 12e6)) / 2
    assert found.direct.bytes_per_s == pytest.approx(1 / byte_s)
    eight = network_of(slow_cluster(), 8)  # a ring of 14 rounds, and still one round
    assert eight.ring.latency_s == pytest.approx(0.3033 * 14 / 6) and eight.direct == found.direct


def test_without_measured_collectives_a_round_takes_two_latencies() -> None:
    found = network_of(preset("1gbe"))
    assert (found.num_replicas, found.ranks_per_link) == (4, 2)
    assert found.ring.latency_s == pytest.approx(12 * 100e-6) and found.direct.latency_s == pytest.approx(200e-6)
    with pytest.raises(ClusterError, match="has 1 rank and so no link"):
        network_of(replace(slow_cluster(), devices=slow_cluster().devices[:1], links=(), timings=()))


def test_assumed_links_replace_only_what_is_given() -> None:
    found = network_of(slow_cluster())
    assert found.with_links() == found
    slower = found.with_links(bytes_per_s=1e6)
    assert slower.ring.bytes_per_s == slower.direct.bytes_per_s == 1e6
    assert (slower.ring.latency_s, slower.latency_s) == (found.ring.latency_s, found.latency_s)
    longer = found.with_links(latency_s=1.0)
    assert longer.ring.latency_s == 12 and longer.ring.bytes_per_s == found.ring.bytes_per_s
    both = found.with_links(bytes_per_s=1e6, latency_s=0.1)
    assert both == links(1e6, 0.1)


def test_hosts_with_unequal_numbers_of_ranks_are_refused() -> None:
    """Replicas of equal size would exchange their gradients through the slow link, in every step."""
    cluster = slow_cluster()
    devices = [
        replace(one, rank=rank, host=min(rank, 3)) for rank, one in enumerate([*cluster.devices, *cluster.devices[:2]])
    ]
    with pytest.raises(ClusterError, match="slow has ranks 1 on host 0, 1 on host 1, 1 on host 2, 3 on host 3, so "):
        network_of(replace(cluster, devices=tuple(devices)))
