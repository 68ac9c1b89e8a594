"""The bytes of sequence parallelism: what is counted is what `plan/partition/wire.py` predicts, and the formulas
behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle import make_trainer, sequence_plan, small_gpt
from ranks import ranks
from test_sequence import text

from weft.plan.partition.sequence import make_places, share_heads
from weft.plan.partition.wire import Member, SplitAttention, attention_bytes, gradient_all_reduce_bytes
from weft.plan.plan import Plan, Recompute

SAMPLES, HIDDEN, LAYERS, ITEM_BYTES = 2, 24, 2, 8


def check(plan: Plan, *, num_tokens: int = 8, heads: int = 4, kv_heads: int = 0) -> None:
    model = small_gpt(hidden=HIDDEN, heads=heads, kv_heads=kv_heads, context=16).double()
    batch = text(SAMPLES * plan.step.microbatches, num_tokens)
    trainer = make_trainer(model, plan, example=batch[0])
    for _ in range(2):  # in the second, ranks agree on the order of their gradients
        trainer.step(*batch)
    before = {axis: traffic.sent_bytes for axis, traffic in trainer.mesh.traffic.items()}
    trainer.step(*batch)
    counted = {axis: traffic.sent_bytes - before[axis] for axis, traffic in trainer.mesh.traffic.items()}
    axes, tensor = plan.axes, plan.axes.tensor
    here, keys_here = heads // tensor, (kv_heads or heads) // tensor
    layers = SplitAttention(
        num_layers=LAYERS,
        samples=SAMPLES,
        places=make_places(num_tokens, ring=axes.ring, ulysses=axes.ulysses, layout=plan.sequence.layout),
        heads=share_heads(here, keys_here, ulysses=axes.ulysses, ring=axes.ring),
        head_dim=HIDDEN // heads,
        item_bytes=ITEM_BYTES,
        ulysses_rank=trainer.mesh.index("ulysses"),
    )
    expected = attention_bytes(layers, plan)
    assert {axis: counted[axis] for axis in expected} == expected
    assert sum(expected.values()) > 0
    if tensor == 1:
        members = [Member(numel=p.numel(), item_bytes=ITEM_BYTES) for p in trainer.model.parameters()]
        gradients = gradient_all_reduce_bytes(members, bucket_bytes=plan.comm.bucket_bytes, data=axes.state)
        assert counted["data+ring+ulysses"] == gradients


def recomputing(policy: str, plan: Plan) -> Plan:
    return replace(plan, recompute=Recompute(policy=policy))


CASES: dict[str, dict[str, Any]] = {
    "ring": {"plan": sequence_plan(ring=2, microbatches=2)},
    "ring, padded": {"plan": sequence_plan(ring=2), "num_tokens": 13},
    "ring, grouped": {"plan": sequence_plan(ring=2, layout="contiguous"), "kv_heads": 2},
    "ring self-attention": {"plan": sequence_plan(ring=2, variant="ring-self-attention")},
    "ulysses": {"plan": sequence_plan(ulysses=2)},
    "ulysses, grouped": {"plan": sequence_plan(ulysses=2), "kv_heads": 1},
    "ulysses, odd heads": {"plan": sequence_plan(ulysses=2), "heads": 3},
    "recomputed": {"plan": recomputing("full", sequence_plan(ring=2))},
    "recomputed in part": {"plan": recomputing("selective", sequence_plan(ring=2))},
}


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_counted_bytes_are_those_foretold(name: str) -> None:
    check(**CASES[name])


@ranks(4)
def test_also_on_four_ranks() -> None:
    check(sequence_plan(ring=2, ulysses=2), kv_heads=2)
    check(sequence_plan(ring=4))
    check(sequence_plan(ulysses=2, tensor=2))


def test_the_formulas() -> None:
    """Ulysses sends 4 s h / P elements less its own part; the ring 2 s h forward and 4 s h backward, less its own."""
    s, h, heads = 64, 32, 8

    def layers(ring: int, ulysses: int, kv_heads: int = heads) -> SplitAttention:
        return SplitAttention(
            num_layers=1,
            samples=1,
            places=make_places(s, ring=ring, ulysses=ulysses, layout="zigzag"),
            heads=share_heads(heads, kv_heads, ulysses=ulysses),
            head_dim=h // heads,
            item_bytes=4,
        )

    for p in (2, 4, 8):
        own = (p - 1) / p
        each_way = 4 * s * h / p * own * 4
        assert attention_bytes(layers(1, p), sequence_plan(ulysses=p)) == {"ring": 0, "ulysses": 2 * each_way}
        there_and_back = (2 + 4) * s * h * own * 4
        assert attention_bytes(layers(p, 1), sequence_plan(ring=p)) == {"ring": there_and_back, "ulysses": 0}
        grouped = attention_bytes(layers(p, 1, kv_heads=2), sequence_plan(ring=p))
        assert grouped["ring"] == there_and_back * 2 / heads
