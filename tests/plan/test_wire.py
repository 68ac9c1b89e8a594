"""The arithmetic of the wire against tables written out by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from weft.plan.partition.flat_buffers import FlatBuffer, shard_buckets, sharded_bytes
from weft.plan.partition.wire import (
    SHARDED_TAIL_ITEM_BYTES,
    SHARDED_TAIL_WORDS,
    TAIL_WORDS,
    Collective,
    Member,
    assign_buckets,
    batch_norm_bytes,
    between_hosts_bytes,
    gradient_all_reduce_bytes,
    sent_bytes,
    tail_of,
)
from weft.plan.partition.zero import Flat
from weft.plan.plan import Axes, Data, Plan, Step

MB = 1 << 20


@pytest.mark.parametrize(
    ("collective", "two", "three", "four"),
    [  # a buffer of 120 bytes on 2, 3 and 4 ranks
        ("all-reduce", 120, 160, 180),
        ("reduce-scatter", 60, 80, 90),
        ("all-gather", 60, 80, 90),
        ("all-to-all", 60, 80, 90),
        ("scatter", 60, 80, 90),
        ("gather", 60, 80, 90),
        ("broadcast", 120, 120, 120),
        ("reduce", 120, 120, 120),
        ("send", 120, 120, 120),
    ],
)
def test_what_one_rank_sends(collective: Collective, two: int, three: int, four: int) -> None:
    assert [sent_bytes(collective, 120, size) for size in (2, 3, 4)] == [two, three, four]


@pytest.mark.parametrize("collective", get_args(Collective))
def test_nothing_is_sent_to_nobody(collective: Collective) -> None:
    assert sent_bytes(collective, 1000, 1) == 0
    assert sent_bytes(collective, 0, 4) == 0


def test_a_part_of_a_byte_is_a_byte() -> None:
    assert [sent_bytes("all-reduce", size, 3) for size in (1, 2, 3, 4)] == [2, 3, 4, 6]
    assert [sent_bytes("all-gather", size, 3) for size in (1, 2, 3, 4)] == [1, 2, 2, 3]


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for size in range(2, 9):
        buffer_bytes = 8 * size
        halves = sent_bytes("reduce-scatter", buffer_bytes, size) + sent_bytes("all-gather", buffer_bytes, size)
        assert sent_bytes("all-reduce", buffer_bytes, size) == halves


def members(sizes: str) -> list[Member]:
    """'9 d4 1' -> members of 9 MB, 4 MB and 1 MB, those with a letter of another kind."""
    made = []
    for word in sizes.split():
        kind, number = (word[0], word[1:]) if word[0].isalpha() else ("float", word)
        made.append(Member(numel=int(float(number) * MB) // 4, item_bytes=4, kind=kind))
    return made


@pytest.mark.parametrize(
    ("sizes", "drawn"),
    [
        # the drawing in wire.py
        ("1 9 9 9 30 2", "(0)(1 2)(3)(4)(5)"),
        # the first bucket closes at 1 MB, and only the first
        ("0.5 0.5 0.5 0.5", "(0 1)(2 3)"),
        ("0.5 0.75 24.25 0.5", "(0)(1 2)(3)"),
        # a member above the limit is alone, whatever is around it
        ("30", "(0)"),
        ("30 30 1", "(0)(1)(2)"),
        ("0.25 30 0.25", "(0)(1)(2)"),
        # exactly full is not too full
        ("1 25 12 13 1", "(0)(1)(2 3)(4)"),
        # kinds fill side by side; a bucket's place is that of its last member
        ("d1 20 d20 10 d10", "(0)(1)(2)(3)(4)"),
        ("0.5 d0.5 0.5 d0.5", "(0 2)(1 3)"),
        ("d0.5 0.5 d24 1", "(0)(2)(1 3)"),
        ("d0.5 0.5 0.25", "(0)(1 2)"),
        ("0.5 d0.5 0.25", "(1)(0 2)"),
        ("24 d0.5 d1 2 d24", "(0)(1)(3)(2 4)"),
        # nothing in, nothing out
        ("", ""),
    ],
)
def test_buckets_as_drawn(sizes: str, drawn: str) -> None:
    found = assign_buckets(members(sizes), 25 * MB)
    assert "".join(f"({' '.join(map(str, bucket))})" for bucket in found) == drawn


def test_every_member_is_in_one_bucket_of_its_kind() -> None:
    given = members("0.1 d3 0.2 e7 12 d30 e1 0.3 d0.1 26 e24 0.4")
    for bucket_bytes in (1, MB // 2, MB, 5 * MB, 1000 * MB):
        found = assign_buckets(given, bucket_bytes)
        assert sorted(index for bucket in found for index in bucket) == list(range(len(given)))
        assert [bucket[-1] for bucket in found] == sorted(bucket[-1] for bucket in found), "ready first, sent first"
        for bucket in found:
            assert len({given[index].kind for index in bucket}) == 1
            assert list(bucket) == sorted(bucket), "members keep their order"
            size = sum(given[index].num_bytes for index in bucket)
            assert size <= bucket_bytes or len(bucket) == 1


def test_one_byte_a_bucket_gives_every_member_its_own() -> None:
    assert {len(bucket) for bucket in assign_buckets(members("1 2 d3 4"), 1)} == {1}


@pytest.mark.parametrize(
    ("item_bytes", "kinds", "tail"),
    [
        ([4, 4], ["a", "a"], Member(numel=TAIL_WORDS + 5 + 2, item_bytes=4, kind="a")),
        ([4, 8, 4], ["a", "b", "a"], Member(numel=TAIL_WORDS + 5 + 3, item_bytes=8, kind="b")),
        # 16 bits cannot count: a word of its own
        ([2], ["h"], Member(numel=TAIL_WORDS + 5 + 1, item_bytes=4, kind="tail")),
        ([2, 4], ["h", "a"], Member(numel=TAIL_WORDS + 5 + 2, item_bytes=4, kind="a")),
    ],
)
def test_the_tail_has_a_word_per_rank_and_parameter_and_never_16_bits(item_bytes, kinds, tail) -> None:
    given = [Member(numel=10, item_bytes=size, kind=kind) for size, kind in zip(item_bytes, kinds, strict=True)]
    assert tail_of(given, num_ranks=5) == tail


def test_gradient_bytes_written_out() -> None:
    # two parameters of 10 and 20 words and a tail of 3 + 2 words, and 1 per rank: 35 words of 4 bytes, and those
    given = [Member(numel=10, item_bytes=4), Member(numel=20, item_bytes=4)]
    assert gradient_all_reduce_bytes(given, bucket_bytes=MB, data=1) == 0
    assert gradient_all_reduce_bytes(given, bucket_bytes=MB, data=2) == 140 + 8
    assert gradient_all_reduce_bytes(given, bucket_bytes=MB, data=4) == 210 + 24
    # on three ranks 4/3 of 152 is no whole number of bytes, and each bucket rounds up
    assert gradient_all_reduce_bytes(given, bucket_bytes=MB, data=3) == 203
    assert gradient_all_reduce_bytes(given, bucket_bytes=1, data=3) == 54 + 107 + 43


def test_batch_norm_bytes_written_out() -> None:
    # 3 channels on 2 ranks: 7 words gathered (each rank sends its own), 6 words all-reduced
    assert batch_norm_bytes([3], item_bytes=4, microbatches=1, data=2) == 7 * 4 + 6 * 4
    assert batch_norm_bytes([3], item_bytes=8, microbatches=3, data=2) == 3 * (7 * 8 + 6 * 8)
    # on 4 ranks each sends its 7 words three times, and 2 · 3/4 of the 6
    assert batch_norm_bytes([3, 3], item_bytes=4, microbatches=1, data=4) == 2 * (3 * 28 + 36)
    assert batch_norm_bytes([3], item_bytes=4, microbatches=1, data=1) == 0
    assert batch_norm_bytes([], item_bytes=4, microbatches=5, data=4) == 0


def sharded_plan(
    shard: str, *, data: int = 2, replicate: int = 1, microbatches: int = 1, reshard: str = "step"
) -> Plan:
    return Plan(
        axes=Axes(data=data, replicate=replicate),
        step=Step(microbatches=microbatches),
        data=Data(shard=shard, reshard=reshard),
    )


def flat_of(numels: tuple[int, ...], num_parts: int, **facts) -> FlatBuffer:
    """A float32 buffer of a block, unless told otherwise."""
    return FlatBuffer(flat=Flat(numels=numels, num_parts=num_parts), **({"block": 0} | facts))


def payload(flats: list[FlatBuffer], plan: Plan) -> dict[str, int]:
    """What a step sends besides its tail."""
    num_parameters = sum(len(one.flat.numels) for one in flats if one.trainable)
    num_ranks = plan.axes.num_ranks
    tail_bytes = (SHARDED_TAIL_WORDS + num_ranks + num_parameters) * SHARDED_TAIL_ITEM_BYTES
    sent = sharded_bytes(flats, plan)
    return {axis: sent[axis] - sent_bytes("all-reduce", tail_bytes, getattr(plan.axes, axis)) for axis in sent}


def all_reduce_payload(numels: list[int], *, bucket_bytes: int, data: int) -> int:
    """What plain data parallelism sends of these float32 gradients besides its tail."""
    given = [Member(numel=numel, item_bytes=4) for numel in numels]
    whole = gradient_all_reduce_bytes(given, bucket_bytes=bucket_bytes, data=data)
    return whole - sent_bytes("all-reduce", tail_of(given, num_ranks=data).num_bytes, data)


NUMELS = [256 * number for number in (1, 3, 40, 2, 7, 1, 12)]  # divide by 16 ranks × 16 elements


@pytest.mark.parametrize("data", [2, 4, 8, 16])
@pytest.mark.parametrize("bucket_bytes", [1, 4096, MB])
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_zero_1_and_2_send_what_an_all_reduce_sends(shard: str, bucket_bytes: int, data: int) -> None:
    buckets = shard_buckets([Member(numel=numel, item_bytes=4) for numel in NUMELS], bucket_bytes)
    flats = [flat_of(tuple(NUMELS[index] for index in bucket), data) for bucket in buckets]
    expected = all_reduce_payload(NUMELS, bucket_bytes=bucket_bytes, data=data)
    assert payload(flats, sharded_plan(shard, data=data)) == {"data": expected, "replicate": 0}


@pytest.mark.parametrize("data", [2, 4, 8, 16])
def test_zero_3_of_blocks_sends_half_as_much_again(data: int) -> None:
    flats = [flat_of((numel,), data) for numel in NUMELS]
    sent = payload(flats, sharded_plan("parameters", data=data))["data"]
    assert 2 * sent == 3 * all_reduce_payload(NUMELS, bucket_bytes=MB, data=data)


def test_what_zero_3_keeps_whole_is_gathered_once() -> None:
    # 64 words on 2 ranks: half of 256 bytes for each gather and each reduction
    block, root = flat_of((64,), 2), flat_of((64,), 2, block=None)
    frozen = flat_of((64,), 2, trainable=False)
    counts = {
        (microbatches, reshard): [
            payload([one], sharded_plan("parameters", microbatches=microbatches, reshard=reshard))["data"] // 128
            for one in (block, root, frozen)
        ]
        for microbatches in (1, 3)
        for reshard in ("step", "microbatch")
    }
    assert counts == {
        (1, "step"): [2 + 1, 1 + 1, 2],
        (1, "microbatch"): [2 + 1, 1 + 1, 2],
        (3, "step"): [1 + 1, 1 + 1, 1],
        (3, "microbatch"): [6 + 3, 3 + 3, 6],
    }


def test_only_zero_2_reduces_every_microbatch_below_zero_3() -> None:
    one = flat_of((64,), 2)
    sent = {shard: payload([one], sharded_plan(shard, microbatches=3))["data"] for shard in ("optimizer", "gradients")}
    assert sent == {"optimizer": 128 + 128, "gradients": 3 * 128 + 128}


def test_nothing_sharded_is_one_all_reduce_of_each_flat() -> None:
    flats = [flat_of((64, 10), 1), flat_of((100,), 1, compute="bfloat16", reduce="bfloat16")]
    for microbatches in (1, 3):
        plan = sharded_plan("nothing", data=4, microbatches=microbatches)
        # 80 words of 4 bytes and 112 of 2, each 2 · 3/4 times
        assert payload(flats, plan) == {"data": 480 + 336, "replicate": 0}


@pytest.mark.parametrize(("shard", "microbatches"), [("optimizer", 1), ("gradients", 3), ("parameters", 3)])
def test_replicas_exchange_parts_once_a_step(shard: str, microbatches: int) -> None:
    flats = [flat_of((640,), 4), flat_of((64,), 4, block=None), flat_of((64,), 4, trainable=shard != "parameters")]
    hybrid = sharded_plan(shard, data=4, replicate=2, microbatches=microbatches)
    alone = sharded_plan(shard, data=4, microbatches=microbatches)
    parts = 160 + 16 + (16 if shard != "parameters" else 0)
    assert payload(flats, hybrid) == {"data": payload(flats, alone)["data"], "replicate": parts * 4}


def test_parameters_and_gradients_travel_in_their_own_formats() -> None:
    one = flat_of((64,), 2, compute="bfloat16")
    assert payload([one], sharded_plan("optimizer")) == {"data": 64 + 128, "replicate": 0}
    assert payload([one], sharded_plan("parameters")) == {"data": 2 * 64 + 128, "replicate": 0}


def test_padding_travels_too() -> None:
    # 3 + 5 elements take 32 places, and three parts of 16 are 48
    assert payload([flat_of((3, 5), 3)], sharded_plan("optimizer", data=3))["data"] == 2 * 2 * 16 * 4


def test_a_sharded_tail_has_a_word_for_each_trainable_parameter() -> None:
    flats = [flat_of((16, 16), 2), flat_of((16,), 2, trainable=False)]
    plan = sharded_plan("parameters", replicate=2)
    sent, without = sharded_bytes(flats, plan), payload(flats, plan)
    # and one for each of the four ranks
    assert {axis: sent[axis] - without[axis] for axis in sent} == {
        "data": (3 + 4 + 2) * 8,
        "replicate": (3 + 4 + 2) * 8,
    }
    # two gathers of both flats and one reduction of the first, whose part of 16 words the replicas exchange
    assert without == {"data": 2 * 64 + 64 + 2 * 64, "replicate": 64}


@pytest.mark.parametrize("shard", ["nothing", "optimizer", "gradients", "parameters"])
def test_one_rank_sends_nothing(shard: str) -> None:
    assert sharded_bytes([flat_of((64,), 1)], sharded_plan(shard, data=1)) == {"data": 0, "replicate": 0}


def test_shard_buckets_fill_from_the_last_parameter() -> None:
    assert shard_buckets(members("2 30 9 9 9 1"), 25 * MB) == ((5,), (4, 3), (2,), (1,), (0,))
    assert shard_buckets(members("0.5 d0.5 0.5 d0.25"), 25 * MB) == ((3, 1), (2, 0))
    assert shard_buckets([], MB) == ()


@pytest.mark.parametrize(("ranks_per_host", "ratio"), [(1, 1.0), (2, 1.5), (4, 1.75), (8, 1.875)])
def test_two_levels_send_less_between_two_hosts(ranks_per_host: int, ratio: float) -> None:
    """All-reduces up to half as much, because a ring is nearly as good; the others by the number of ranks a host."""

    def ratio_of(collective: str) -> float:
        one, two = (
            between_hosts_bytes(
                collective,  # type: ignore[arg-type]
                1000,
                num_hosts=2,
                ranks_per_host=ranks_per_host,
                num_levels=levels,
            )
            for levels in (1, 2)
        )
        return one / two

    assert ratio_of("all-reduce") == ratio
    assert ratio_of("reduce-scatter") == ratio_of("all-gather") == ranks_per_host


def test_one_host_sends_nothing_to_others() -> None:
    assert between_hosts_bytes("all-reduce", 1000, num_hosts=1, ranks_per_host=4, num_levels=2) == 0
