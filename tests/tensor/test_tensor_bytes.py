"""The bytes of tensor parallelism: what is counted equals what `plan/partition/wire.py` predicts, and the formulas
behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle import cross_entropy, make_trainer, small_gpt, tensor_plan, token_batch
from ranks import ranks

from weft.plan.partition.wire import SplitLayers, sent_bytes, tensor_bytes
from weft.plan.plan import Plan, Recompute

SAMPLES, TOKENS, HIDDEN, VOCABULARY, LAYERS, ITEM_BYTES = 2, 8, 16, 17, 2, 8
ACTIVATION_BYTES = SAMPLES * TOKENS * HIDDEN * ITEM_BYTES

LOSSES: dict[str, dict[str, Any]] = {
    "cross-entropy": {"num_targets": SAMPLES * TOKENS, "loss_item_bytes": ITEM_BYTES},
    "own": {},
}


def check(plan: Plan, *, loss: str = "cross-entropy", broadcast_bytes: int = 0, **changes: Any) -> None:
    num_samples = SAMPLES * plan.step.microbatches * plan.axes.data
    inputs, targets = token_batch(num_samples)
    model = small_gpt(**changes).double()
    trainer = make_trainer(model, plan, loss=loss if loss == "cross-entropy" else cross_entropy)
    rows = slice(
        trainer.data_rank * num_samples // plan.axes.data, (trainer.data_rank + 1) * num_samples // plan.axes.data
    )
    trainer.step(inputs[rows], targets[rows])
    before = trainer.mesh.traffic["tensor"].sent_bytes
    trainer.step(inputs[rows], targets[rows])
    counted = trainer.mesh.traffic["tensor"].sent_bytes - before
    size, index = plan.axes.tensor, trainer.mesh.index("tensor")
    kv_heads, head_dim = changes.get("kv_heads", 0), HIDDEN // changes.get("heads", 2)
    widest = -(-VOCABULARY // size) * size
    layers = SplitLayers(
        activation_bytes=ACTIVATION_BYTES,
        num_regions=2 * LAYERS,
        num_embeddings=1,
        num_outputs=1,
        whole_output_bytes=0 if loss == "cross-entropy" else SAMPLES * TOKENS * widest * ITEM_BYTES,
        partial_bytes=HIDDEN * ITEM_BYTES * 2 * LAYERS if plan.tensor.sequence else 0,
        broadcast_bytes=broadcast_bytes,
        repeated_bytes=((head_dim * HIDDEN * ITEM_BYTES, size // kv_heads),) * 2 * LAYERS if kv_heads else (),
        **LOSSES[loss],
    )
    assert counted == tensor_bytes(layers, plan) > 0, f"at place {index}"


PLANS = {
    "plain": tensor_plan(2, microbatches=2),
    "clipped": tensor_plan(2, clip_norm=0.1),
    "split tokens": tensor_plan(2, sequence=True, microbatches=2),
    "recomputed": replace(tensor_plan(2), recompute=Recompute(policy="full")),
    "recomputed, split tokens": replace(tensor_plan(2, sequence=True), recompute=Recompute(policy="full")),
    "products kept": replace(tensor_plan(2), recompute=Recompute(policy="selective")),
}


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize("name", PLANS)
def test_counted_bytes_are_those_foretold(name: str) -> None:
    check(PLANS[name])


@ranks(2)
def test_whole_logits_and_repeated_heads_cost_what_they_cost() -> None:
    check(tensor_plan(2), loss="own")
    check(tensor_plan(2), heads=4, kv_heads=1)


@ranks(4)
def test_also_on_four_ranks() -> None:
    check(tensor_plan(4, sequence=True), heads=4)
    check(tensor_plan(2, data=2), heads=4)
    with pytest.MonkeyPatch.context() as patch:  # as with three data ranks, whose sums may round differently
        patch.setattr("weft.parallel.apply.sums_may_differ", lambda *_: True)
        num_norms = 2 * LAYERS + 1
        check(tensor_plan(2, data=2, microbatches=2), broadcast_bytes=num_norms * HIDDEN * ITEM_BYTES)


@ranks(2)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_attention_that_runs_whole_gathers_its_tokens(policy: str) -> None:
    """Once forward, and its gradients are scattered once."""
    plan = replace(tensor_plan(2, sequence=True), recompute=Recompute(policy=policy))
    inputs, targets = token_batch(SAMPLES)
    model = small_gpt().double()
    regions = model.weft_blueprint().regions
    assert regions is not None
    blueprint = replace(model.weft_blueprint(), regions=tuple(one for one in regions if "attention" not in str(one)))
    model.weft_blueprint = lambda: blueprint  # type: ignore[method-assign]
    trainer = make_trainer(model, plan)
    whole_bytes = sum(p.nbytes for block in model.blocks for p in (*block.attention.parameters(),))
    trainer.step(inputs, targets)
    before = trainer.mesh.traffic["tensor"].sent_bytes
    trainer.step(inputs, targets)
    layers = SplitLayers(
        activation_bytes=ACTIVATION_BYTES,
        num_regions=LAYERS,
        num_whole_attentions=LAYERS,
        num_embeddings=1,
        num_outputs=1,
        partial_bytes=HIDDEN * ITEM_BYTES * 2 * LAYERS + whole_bytes,
        **LOSSES["cross-entropy"],
    )
    assert trainer.mesh.traffic["tensor"].sent_bytes - before == tensor_bytes(layers, plan)


def test_the_formula() -> None:
    """Two all-reduces each way per layer; split tokens send the same, and gather each input once more."""
    layers = SplitLayers(activation_bytes=1000, num_regions=2)
    assert tensor_bytes(layers, tensor_plan(4)) == 4 * sent_bytes("all-reduce", 1000, 4) == 4 * 1500
    inside = 4 * 1500 + 2 * 750
    around = 2 * 750
    assert tensor_bytes(layers, tensor_plan(4, sequence=True)) == inside + around
