"""What sharded training costs and keeps: bytes on the wire and in memory are the formulas', to the byte or within 2 %.

The formulas are those of the ZeRO paper, padding included on the wire (`plan/partition/wire.py`). That every plan gives
one process's answer is the matrix's business (`tests/laws`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from oracle import ADAMW, cut_evenly, data_plan, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.mesh import Mesh
from weft.models.gpt import GPT, GPTConfig
from weft.plan.partition.flat_buffers import FlatBuffer, sharded_bytes
from weft.plan.partition.wire import batch_norm_bytes, sent_bytes
from weft.plan.plan import Plan, Precision
from weft.sync.zero import ZeroSync
from weft.training.trainer import Trainer

STAGES = ONE, TWO, THREE = "optimizer", "gradients", "parameters"
OWN = Precision()
BF16 = Precision(compute="bf16")
BF16_WIRE = Precision(compute="bf16", reduce="bf16")
BF16_ALL = Precision(compute="bf16", reduce="bf16", accumulate="bf16")

# ---- bytes on the wire ----


class Odd(nn.Module):
    """A GPT with a frozen block, a bias in fewer elements than there are ranks, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = small_gpt(num_layers=3, bias=True)
        self.gpt.blocks[1].requires_grad_(False)
        self.few, self.one = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens) * self.one + self.few.sum()
        return logits


def planned(data: int, precision: Precision = OWN, **changes: Any) -> Plan:
    return dataclasses.replace(data_plan(data, bucket_bytes=3000, check_every=0, **changes), precision=precision)


def wire_plans(data: int, replicate: int) -> list[Plan]:
    common = {"data": data, "replicate": replicate}
    plans = [
        planned(**common, shard=shard, microbatches=microbatches, precision=precision)
        for shard, microbatches, precision in itertools.product(STAGES, (1, 3), (OWN, BF16, BF16_WIRE))
    ]
    plans += [
        planned(**common, shard=THREE, microbatches=3, reshard="microbatch", precision=precision)
        for precision in (OWN, BF16, BF16_WIRE)
    ]
    if replicate == 1:
        plans += [planned(data, BF16), planned(data, BF16_WIRE, microbatches=3), planned(data, BF16_ALL)]
    return plans


def flats_of(trainer: Trainer) -> list[FlatBuffer]:
    """The buffers that the trainer allocated, described by their tensors."""
    blocks = trainer.blueprint.blocks
    return [
        FlatBuffer(
            flat=flat.flat,
            compute=str(flat.whole.dtype).removeprefix("torch."),
            reduce={"fp32": "float32", "bf16": "bfloat16"}[trainer.plan.precision.reduce],
            trainable=flat.parameters[0].requires_grad,
            block=0 if any(name.startswith(f"{block}.") for block in blocks for name in flat.names) else None,
        )
        for flat in trainer.sync.flats
    ]


def sent_in_a_step(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """Bytes by axis in the second step; the first agrees on a count of targets besides."""
    part = cut_evenly(batch, trainer.data_size)[trainer.data_rank]
    trainer.step(*part)
    before = sent_so_far(trainer.mesh)
    trainer.step(*part)
    return {axis: sent - before.get(axis, 0) for axis, sent in sent_so_far(trainer.mesh).items()}


def sent_so_far(mesh: Mesh) -> dict[str, int]:
    return {axis: traffic.sent_bytes for axis, traffic in mesh.traffic.items()}


def check_wire(plan: Plan) -> None:
    trainer = make_trainer(Odd(), plan, optimizer=ADAMW)
    counted = sent_in_a_step(trainer, token_batch(12))
    predicted = sharded_bytes(flats_of(trainer), plan)
    assert predicted["data"] > 0 and (predicted["replicate"] > 0) == (plan.axes.replicate > 1)
    assert {axis: sent for axis, sent in counted.items() if sent} == {k: v for k, v in predicted.items() if v}, plan


@pytest.mark.sampled(5)
@ranks(2)
@pytest.mark.parametrize("number", range(len(wire_plans(2, 1))))
def test_two_ranks_send_what_the_formulas_say(number: int) -> None:
    check_wire(wire_plans(2, 1)[number])


@pytest.mark.long
@ranks(4)
def test_four_ranks_send_what_the_formulas_say() -> None:
    for plan in wire_plans(4, 1)[1::4]:
        check_wire(plan)


@ranks(4)
def test_two_by_two_ranks_send_what_the_formulas_say() -> None:
    for plan in wire_plans(2, 2)[::4]:
        check_wire(plan)


@ranks(2)
def test_the_formulas_are_those_of_the_paper() -> None:
    """Stages 1 and 2 send what an all-reduce of all gradients would, stage 3 half as much again."""
    sent, flats = {}, {}
    for shard in STAGES:
        trainer = make_trainer(small_gpt(num_layers=4, tied=False), data_plan(2, shard=shard, check_every=0))
        num_members = sum(len(flat.names) for flat in trainer.sync.flats)
        flats[shard] = flats_of(trainer)
        sent[shard] = sent_in_a_step(trainer, token_batch(4))["data"] - sent_bytes(
            "all-reduce", 8 * (3 + 2 + num_members), 2
        )
    for shard in (ONE, TWO):
        assert sent[shard] == sum(sent_bytes("all-reduce", 4 * one.flat.numel, 2) for one in flats[shard])
    blocks = sum(one.flat.numel for one in flats[THREE] if one.block is not None)
    root = sum(one.flat.numel for one in flats[THREE] if one.block is None)
    assert sent[THREE] == sent_bytes("all-gather", 4 * (3 * blocks + 2 * root), 2)


@ranks(2)
def test_batch_norm_statistics_come_on_top() -> None:
    model = small_convnet().float()
    norms = [module.num_features for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    trainer = make_trainer(model, data_plan(2, shard=THREE, check_every=0))
    images, classes = image_batch(8)
    expected = sharded_bytes(flats_of(trainer), trainer.plan)["data"]
    expected += batch_norm_bytes(norms, item_bytes=4, microbatches=1, data=2)
    assert sent_in_a_step(trainer, (images.float(), classes))["data"] == expected


# ---- bytes in memory ----


def million() -> GPT:
    return GPT(GPTConfig(vocab_size=256, context=16, num_layers=5, hidden=128, heads=2))


def storages(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors, each piece of memory once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def state_bytes(trainer: Trainer) -> float:
    """All that a rank keeps from one step to the next, while the passes of a step run; its share of common memory."""
    sync = trainer.sync
    assert isinstance(sync, ZeroSync)
    sync.begin()
    common = [flat for flat in sync.flats if flat.is_common]
    tensors = [tensor for flat in sync.flats for tensor in (flat.whole, flat.mine, flat.master)]
    tensors += [piece.tensor for piece in sync.pieces]
    for gradients in sync._gradients:
        tensors += [gradients.part] if gradients._whole is None else [gradients.part, gradients._whole]
    tensors += [value for state in trainer.optimizer.state.values() for value in state.values()]
    shared = {flat.whole.untyped_storage().data_ptr() for flat in common}
    own = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in shared]
    return storages(own) + storages([flat.whole for flat in common]) / sync.flats[0].group.size


def bytes_a_parameter(stage: int, precision: Precision, num_ranks: int) -> float:
    """The paper's, for Adam: (weights, gradients, what the optimizer keeps), each whole or shared out."""
    weights, gradients, kept = {
        OWN: (4, 4, 8),  # a parameter is its own master
        BF16: (2, 4, 12),
        BF16_ALL: (2, 2, 12),
    }[precision]
    parts = [weights / num_ranks if stage == 3 else weights]
    parts += [gradients / num_ranks if stage >= 2 else gradients, kept / num_ranks if stage >= 1 else kept]
    return sum(parts)


def check_state(num_ranks: int, shard: str, precision: Precision) -> None:
    model = million()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters > 900_000
    trainer = make_trainer(model, planned(num_ranks, precision, shard=shard), optimizer=ADAMW)
    trainer.step(torch.randint(256, (1, 16)), torch.randint(256, (1, 16)))
    stage = ("nothing", *STAGES).index(shard)
    expected = num_parameters * bytes_a_parameter(stage, precision, num_ranks)
    assert state_bytes(trainer) == pytest.approx(expected, rel=0.02)
    if stage == 3:  # whole parameters are gone, or there is one copy for all ranks
        apart = [flat for flat in trainer.sync.flats if not flat.is_common]
        assert sum(flat.whole.untyped_storage().nbytes() for flat in apart) == 0


STATES = [*itertools.product(("nothing", *STAGES), (BF16, BF16_ALL)), *itertools.product(STAGES, (OWN,))]


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize(("shard", "precision"), STATES)
def test_two_ranks_keep_what_the_formulas_say(shard: str, precision: Precision) -> None:
    check_state(2, shard, precision)


@pytest.mark.sampled(2)
@ranks(4)
@pytest.mark.parametrize("shard", STAGES)
def test_four_ranks_keep_what_the_formulas_say(shard: str) -> None:
    check_state(4, shard, BF16)


def test_the_table_is_the_one_that_is_known() -> None:
    assert [bytes_a_parameter(0, precision, 64) for precision in (BF16_ALL, BF16)] == [16, 18]
    assert [bytes_a_parameter(stage, BF16_ALL, 64) for stage in (1, 2, 3)] == [4 + 12 / 64, 2 + 14 / 64, 16 / 64]
