"""Mixed precision against a loop by hand (`by_hand.py`): every format, every ZeRO stage, 1, 2 and 4 ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from by_hand import DTYPES, SHARDS, SMALLEST, UNIT, ByHand, adamw, gradients, masters, mixed, worst_excess
from meshes import verify
from oracle import ADAMW, cut, cut_evenly, data_plan, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from ranks import ranks

from weft.plan.partition.flat_buffers import FlatBuffer, sharded_bytes

FIXED_SCALE = 256


def check(compute: str, shard: str, microbatches: int, accumulate: str, reduce: str, replicate: int = 1) -> None:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    scale = FIXED_SCALE if compute == "fp16" else 1
    reshard = "microbatch" if shard == "parameters anew" else "step"
    plan = data_plan(num_ranks // replicate, shard=shard.split()[0], reshard=reshard, replicate=replicate,
                     microbatches=microbatches, bucket_bytes=4000)  # fmt: skip
    fixed = {"loss_scale": FIXED_SCALE} if compute == "fp16" else {}
    plan = mixed(plan, compute=compute, accumulate=accumulate, reduce=reduce, **fixed)
    model = small_gpt()
    by_hand = ByHand(model, DTYPES[compute], scale=scale)
    trainer = make_trainer(model, plan, optimizer=adamw)
    # In float32: every addition, and the factor at the end. In 16 bits: what the plan asks for and no more, which is
    # one rounding per microbatch to accumulate; in the exchange one to send, and one for each other rank to add.
    single = {"fp32": num_ranks * microbatches + 2}
    roundings = dict(single)
    if num_ranks * microbatches > 1:
        roundings[accumulate] = roundings.get(accumulate, 0) + microbatches
    if num_ranks > 1:
        roundings[reduce] = roundings.get(reduce, 0) + num_ranks
    is_coarse = False
    for step in range(2):
        parts = cut_evenly(token_batch(5 * num_ranks, seed=step), num_ranks)
        loss = float(trainer.step(*parts[trainer.data_rank]))
        # One float32 number per microbatch on both sides, added up in float64.
        assert loss == pytest.approx(by_hand.step(parts, microbatches), rel=1e-6)
        assert worst_excess(trainer, by_hand, roundings) <= 1
        is_coarse = is_coarse or worst_excess(trainer, by_hand, single) > 1
        for flat in trainer.sync.flats:
            assert flat.master.dtype == torch.float32 and flat.mine.dtype == DTYPES[compute]
            assert torch.equal(flat.mine, flat.master.to(flat.mine.dtype)), "cast back"
        by_hand.go_on_from(masters(trainer))
    if accumulate != "fp32" and num_ranks * microbatches > 1:
        assert is_coarse, "16 bits round; if nothing does, they are not used"


ON_RANKS = {1: check, 2: ranks(2)(check), 4: ranks(4)(check)}


ALL = ("fp32 fp32", "fp32 16", "16 fp32", "16 16")
FEW = {1: ("fp32 fp32", "16 fp32"), 3: ("fp32 fp32", "16 16")}
"""By microbatches: the formats in which three or more ranks could differ from two."""

CASES = [
    pytest.param(
        num_ranks,
        compute,
        shard,
        microbatches,
        formats,
        marks=[pytest.mark.long]
        if formats not in FEW[microbatches]
        or (compute == "fp16" and (num_ranks == 4 or shard != "parameters"))
        or (num_ranks == 4 and shard in ("nothing", "optimizer"))
        or (num_ranks == 2 and shard == "optimizer")
        else [],
    )
    for num_ranks in ON_RANKS
    for compute in ("bf16", "fp16")
    for shard in (*SHARDS, "parameters anew")
    for microbatches in (1, 3)
    if microbatches > 1 or shard != "parameters anew"  # with one there is nothing to gather anew
    for formats in (ALL if num_ranks == 2 else FEW[microbatches])
]


@pytest.mark.sampled(4, long=33)
@pytest.mark.parametrize(("num_ranks", "compute", "shard", "microbatches", "formats"), CASES)
def test_a_step_by_hand(num_ranks: int, compute: str, shard: str, microbatches: int, formats: str) -> None:
    """`formats`: of accumulation and of the exchange."""
    accumulate, reduce = (compute if name == "16" else name for name in formats.split())
    ON_RANKS[num_ranks](compute=compute, shard=shard, microbatches=microbatches, accumulate=accumulate, reduce=reduce)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("shard", ["optimizer", "parameters anew"])
def test_hybrid_sharding_by_hand(shard: str, compute: str, reduce: str) -> None:
    """The other 16-bit format on the wire, too: bf16 may carry fp16's gradients."""
    check(compute, shard, 3, "fp32", reduce, replicate=2)


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_is_16_bit_itself(dtype: torch.dtype, shard: str) -> None:
    """No masters: gradients add up in float32 over microbatches and ranks, then are what the model is."""
    model = small_gpt().to(dtype)
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, data_plan(2, shard=shard, microbatches=3), optimizer=sgd)
    unit = UNIT["bf16" if dtype == torch.bfloat16 else "fp16"]
    assert trainer.grad_norm is None
    for step in range(3):
        parts = cut_evenly(token_batch(10, seed=step), 2)
        trainer.step(*parts[trainer.data_rank])
        by_hand = ByHand(alone, dtype)
        by_hand.step(parts, 3)
        found, updated = gradients(trainer), masters(trainer)
        for name, parameter in alone.named_parameters():
            assert found[name].dtype == updated[name].dtype == dtype
            # The sum is that of float32, rounded once; a sum that falls on the other side is one step further.
            off = (found[name].double() - by_hand.sums[name]).abs()
            assert (off <= 1.01 * unit * by_hand.sums[name].abs() + 1e-6 * by_hand.sizes[name] + SMALLEST["fp16"]).all()
            parameter.grad = found[name]
        sgd(alone.parameters()).step()
        for name, parameter in alone.named_parameters():
            assert torch.equal(updated[name], parameter), "the same update, given the same gradient"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(2)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_convnet_learns(compute: str, shard: str) -> None:
    """Convolutions in 16 bits, BatchNorm and its statistics in float32: about as well as all in float32."""
    start = small_convnet()
    batch = cut(image_batch(16), (9, 7))
    losses = {}
    for name in ("model", compute):
        trainer = make_trainer(
            copy.deepcopy(start), mixed(data_plan(2, shard=shard, microbatches=2), compute=name), optimizer=adamw
        )
        inputs, targets = batch[trainer.data_rank]
        losses[name] = [float(trainer.step(inputs.float(), targets)) for _ in range(10)]
        for key, master in masters(trainer).items():
            assert master.dtype == torch.float32, key
        for key, buffer in trainer.named_model.named_buffers():
            assert buffer.dtype == (torch.int64 if key.endswith("tracked") else torch.float32)
        trainer.check_divergence()
    for flat in trainer.sync.flats:
        is_norm = {"norm" in key for key in flat.names}
        assert len(is_norm) == 1, "what has another format is in a buffer of its own"
        assert flat.mine.dtype == (torch.float32 if is_norm.pop() else DTYPES[compute])
    assert losses[compute][-1] < 0.8 * losses[compute][0]
    # About ten layers, each rounding to 8 or 11 bits; the same layers in the backward pass.
    assert losses[compute] == pytest.approx(losses["model"], rel=20 * UNIT[compute])


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "gradients"])
def test_uneven_parts_have_the_mean_of_the_global_batch(shard: str) -> None:
    """Also a rank without samples. The count of the last step is corrected, by a factor that is no power of two: then
    the backward passes differ by their own roundings, about one per layer, and not by a whole part."""
    model = small_gpt()
    by_hand = ByHand(model, torch.bfloat16)
    trainer = make_trainer(model, mixed(data_plan(2, shard=shard, microbatches=2), compute="bf16"), optimizer=adamw)
    for step, sizes in enumerate([(5, 3), (3, 0), (1, 6)]):
        parts = cut(token_batch(sum(sizes), seed=step), sizes)
        loss = float(trainer.step(*parts[trainer.data_rank]))
        assert loss == pytest.approx(by_hand.step(parts, 2), rel=1e-6)
        for name, gradient in gradients(trainer).items():
            expected = by_hand.sums[name]
            assert float((gradient - expected).norm()) <= 4 * UNIT["bf16"] * float(expected.norm()), name
        by_hand.go_on_from(masters(trainer))


@ranks(2)
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_travel_in_the_format_of_the_plan(shard: str, reduce: str) -> None:
    plan = mixed(data_plan(2, shard=shard, microbatches=2), compute="bf16", reduce=reduce)
    trainer = make_trainer(small_gpt(), plan)
    parts = cut_evenly(token_batch(4), 2)
    trainer.step(*parts[trainer.data_rank])
    before = trainer.mesh.traffic["data"].sent_bytes
    trainer.step(*parts[trainer.data_rank])
    flats = [
        FlatBuffer(
            flat=flat.flat,
            compute="bfloat16",
            reduce=str(DTYPES[reduce]).removeprefix("torch."),
            block=0 if flat.names[0].startswith("blocks") else None,
        )
        for flat in trainer.sync.flats
    ]
    assert trainer.mesh.traffic["data"].sent_bytes - before == sharded_bytes(flats, plan)["data"]


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(2)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_verify_compares_in_its_own_formats(compute: str, shard: str) -> None:
    plan = mixed(data_plan(2, shard=shard, microbatches=2, clip_norm=0.5), compute=compute, accumulate=compute)
    batches = [token_batch(size, seed=size) for size in (6, 3)]
    outcome = verify(small_gpt(), plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, device="cpu").require()
    assert outcome.tolerance == 1e-10 and outcome.worst("weight").error > 0
