"""Copies of a parameter on several stages or tensor ranks stay equal to the bit, whatever order their data ranks are
added up in, and are exchanged once in a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import data_group, verify
from oracle import ADAMW, cut_evenly, data_plan, make_trainer, pipeline_plan, small_gpt, tensor_plan, token_batch
from ranks import ranks
from strict_nccl.world import strict_world

from weft.blueprint import find_blueprint
from weft.comm import collectives
from weft.comm.collectives import Pending, all_gather
from weft.comm.group import Group
from weft.comm.shared_gradients import SharedGradient, SharedGradientExchange, sums_may_differ
from weft.layout import Layout
from weft.mesh import make_mesh
from weft.models.gpt import GPT
from weft.parallel.tensor.replicated_gradients import find_misaligned
from weft.parallel.tensor.shares import make_shares
from weft.plan.partition.flat_buffers import ParameterSpec, flat_buffers
from weft.plan.plan import Plan
from weft.sync.make import place
from weft.sync.norm import GradientRules
from weft.training.parallelize import parallelize
from weft.training.trainer import Trainer
from weft.world import join_world

NUM_STEPS = 20


def reduce_as_rings_do(patch: pytest.MonkeyPatch, holder: int) -> None:
    """Let sums over data round up or down by their place in the buffer and by the group, as other orders would."""

    def total(tensor: torch.Tensor, group: Group) -> torch.Tensor:
        rows = tensor.new_empty(group.size, tensor.numel())
        all_gather(rows.view(-1), tensor.view(-1), group)
        exact = rows.double().sum(0)
        nearest = exact.to(tensor.dtype)
        goes_up = (torch.arange(tensor.numel()) + holder) % 2 == 0
        beyond = torch.nextafter(nearest, torch.where(goes_up, math.inf, -math.inf).to(tensor.dtype))
        is_wrong_side = torch.where(goes_up, nearest.double() < exact, nearest.double() > exact)
        return torch.where(is_wrong_side, beyond, nearest)

    def all_reduce(tensor: torch.Tensor, group: Group, *, wait: bool = True) -> Pending:
        tensor.copy_(total(tensor, group))
        return Pending(None, group.traffic)

    def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, group: Group, *, add: bool, **_: object) -> Pending:
        part = total(tensor, group).view(group.size, -1)[group.index]
        output.copy_(output + part if add else part)
        return Pending(None, group.traffic)

    patch.setattr("weft.sync.allreduce.all_reduce", all_reduce)
    patch.setattr("weft.sync.zero_gradients.reduce_scatter", reduce_scatter)


def holders_first(trainer: Trainer) -> None:
    """Plant the other order: sum over holders, and then over data."""
    sync: Any = trainer.sync
    exchange, finish = sync._shared.run, sync.finish
    sync._shared.run = lambda *_: None

    def finish_late(*args: Any, **settings: Any) -> Any:
        exchange({piece.name: piece.tensor.grad for piece in sync.pieces if piece.name in sync._shared.names})
        return finish(*args, **settings)

    sync.finish = finish_late


def differing(trainer: Trainer) -> set[str]:
    """Names of parameters that the tensor axis does not split, and of which two ranks have unequal copies or gradients.

    Gradients are compared too, because a last bit of one does not show in weights that are much larger.
    """
    mine = []
    for piece in trainer.sync.pieces:
        if not piece.layout.splits:
            assert piece.tensor.grad is not None
            both = torch.stack([piece.tensor.detach(), piece.tensor.grad])
            mine.append((piece.name, piece.layout.flat_range, both.numpy().tobytes()))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    seen: dict[tuple[str, Any], set[bytes]] = {}
    for name, kept, values in (entry for entries in found for entry in entries):
        seen.setdefault((name, kept), set()).add(values)
    return {name for (name, _), different in seen.items() if len(different) > 1}


def make_model(plan: Plan) -> GPT:
    """A model with a tied weight for a pipeline; for the tensor axis one whose embedding is larger than its blocks."""
    return small_gpt() if plan.axes.pipeline > 1 else small_gpt(vocab_size=117, tied=False)


def train(plan: Plan, plant: Callable[[Trainer], None] | None = None, *, differs: bool = True) -> set[str]:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.parallel.apply.sums_may_differ", lambda *_: differs)  # two data ranks, but patched
        trainer = make_trainer(make_model(plan), plan, optimizer=ADAMW, example=token_batch(2)[0])
        reduce_as_rings_do(patch, trainer.mesh.index("pipeline") + trainer.mesh.index("tensor"))
        if plant is not None:
            plant(trainer)
        for step in range(NUM_STEPS):
            trainer.step(*cut_evenly(token_batch(8, seed=step), 2)[trainer.data_rank])
        return differing(trainer)


PLANS = {
    "tied": pipeline_plan(2, data=2, microbatches=2),
    "tied, zero 1": pipeline_plan(2, data=2, microbatches=2, shard="optimizer"),
    "tied, zero 3": pipeline_plan(2, data=2, microbatches=2, shard="parameters"),
    "whole": tensor_plan(2, data=2),
    "whole, zero 3": tensor_plan(2, data=2, microbatches=2, shard="parameters"),
    "split tokens": tensor_plan(2, data=2, microbatches=2, sequence=True),
    "split tokens, zero 2": tensor_plan(2, data=2, sequence=True, shard="gradients"),
}


@pytest.mark.sampled(2, long=3)
@ranks(4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in ("tied, zero 1", "whole, zero 3"))) for name in PLANS],
)
def test_copies_stay_equal_whatever_order_data_ranks_are_added_in(name: str) -> None:
    assert train(PLANS[name]) == set()


@pytest.mark.long
@ranks(4)
def test_they_would_not_the_other_way_round() -> None:
    assert "embedding.weight" in train(PLANS["tied"], holders_first)
    assert "blocks.0.attention_norm.weight" in train(PLANS["split tokens"], holders_first)
    assert "norm.weight" in train(PLANS["whole"], differs=False)


class Experts(torch.nn.Module):
    """A layer that only the first rank's tokens go through, and one that all of them go through."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen, self.always = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)


UNUSED_BY_SOME = {
    "tensor": tensor_plan(4),
    "tensor, data": tensor_plan(2, data=2),
    "tensor, data, zero 1": tensor_plan(2, data=2, shard="optimizer"),
}


@ranks(4)
@pytest.mark.parametrize("name", UNUSED_BY_SOME)
def test_a_parameter_that_one_holder_did_not_use_has_the_sum_on_all_of_them(name: str) -> None:
    plan, model = UNUSED_BY_SOME[name], Experts()
    mesh = make_mesh(plan, join_world("cpu"))
    group = mesh.group("tensor", "activations")
    shared = [SharedGradient(name=one, group=group, kind="sum") for one, _ in model.named_parameters()]
    layouts = {one: Layout(global_shape=tuple(parameter.shape)) for one, parameter in model.named_parameters()}
    sync = place(
        model,
        mesh,
        find_blueprint(model),
        layouts=layouts,
        cut=None,
        rules=GradientRules(shared=tuple(shared)),
        stage_of=None,
    )
    sync.begin()
    sync.arm()
    tokens = torch.ones(2, 4) * (dist.get_rank() + 1)
    model.always(model.chosen(tokens) if mesh.index("tensor") == 0 else tokens).sum().backward()
    sync.end_microbatch()
    sync.finish(torch.zeros(()), torch.ones(()), with_norm=False)
    found: list[Any] = [None] * dist.get_world_size()
    mine = {piece.name: (piece.layout.flat_range, piece.tensor.grad) for piece in sync.pieces if piece.tensor.numel()}
    dist.all_gather_object(found, mine)
    by_part: dict[Any, list[torch.Tensor]] = {}
    for rank in found:
        for one, (flat_range, gradient) in rank.items():
            assert gradient is not None and gradient.any(), one
            by_part.setdefault((one, flat_range), []).append(gradient)
    assert {one for one, _ in by_part} == set(layouts)
    assert all(torch.equal(first, other) for first, *others in by_part.values() for other in others)


def train_on_rings(plan: Plan, plant: Callable[[Trainer], None] | None = None) -> set[str]:
    """Train on three data ranks over the stand-in for NCCL, which adds up in the order of a ring."""
    torch.manual_seed(0)
    plan = replace(plan, axes=replace(plan.axes, data=3))
    with strict_world(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.world.backend_of", lambda *_: "strict")
        given: dict[str, Any] = {"loss": "cross-entropy", "optimizer": ADAMW, "device": "cpu"}
        with parallelize(make_model(plan), plan, example=token_batch(2)[0], **given) as trainer:
            if plant is not None:
                plant(trainer)
            for step in range(NUM_STEPS):
                trainer.step(*cut_evenly(token_batch(12, seed=step), 3)[trainer.data_rank])
            return differing(trainer)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(6)
@pytest.mark.parametrize("name", PLANS)
def test_copies_stay_equal_over_rings_of_three(name: str) -> None:
    assert train_on_rings(PLANS[name]) == set()


@pytest.mark.long
@ranks(6)
def test_they_would_not_the_other_way_round_on_rings_either() -> None:
    assert "embedding.weight" in train_on_rings(PLANS["tied"], holders_first)


@ranks(2)
def test_split_tokens_exchange_the_gradients_of_norms_once_a_step() -> None:
    """Whatever the number of microbatches, in which all other exchanges are repeated."""
    counted = {}
    for microbatches in (1, 3):
        plan = tensor_plan(2, sequence=True, microbatches=microbatches)
        trainer = make_trainer(small_gpt(num_layers=4), plan)
        inside: list[str] = []
        with pytest.MonkeyPatch.context() as patch:

            def count(tensor: torch.Tensor, group: Group, seen: list[str] = inside) -> Pending:
                seen.append(group.axis)
                return collectives.all_reduce(tensor, group)

            patch.setattr("weft.comm.shared_gradients.all_reduce", count)
            trainer.step(*token_batch(6))
            before = trainer.mesh.traffic["tensor"].num_calls
            trainer.step(*token_batch(6))
        assert inside == ["tensor", "tensor"], "one in each of two steps"
        counted[microbatches] = trainer.mesh.traffic["tensor"].num_calls - before
    assert counted[3] - 1 == 3 * (counted[1] - 1)


@ranks(3)
def test_three_holders_add_in_the_order_of_ranks() -> None:
    """Ranks of another group do the same, and their ring may be another."""
    group = data_group("gradients")
    drawn = [torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    shared = SharedGradient(name="weight", group=group, kind="sum")
    repeated = SharedGradient(name="heads", group=group, kind="sum", within=(1, 1, 2))
    for dtype in (torch.float32, torch.bfloat16):
        given = [one.to(dtype) for one in drawn]
        whole, heads = given[group.index].clone(), given[group.index].clone()
        SharedGradientExchange([shared, repeated], bucket_bytes=1000).run({"weight": whole, "heads": heads})
        expected = torch.stack(given).sum(0)
        assert torch.equal(whole, expected)
        assert torch.equal(heads[:, 1:], expected[:, 1:]) and torch.equal(heads[:, 0], given[group.index][:, 0])


@ranks(3)
def test_sums_of_three_may_differ_unless_added_in_the_order_of_ranks() -> None:
    there, over_sockets = (data_group("gradients", transport=transport) for transport in ("shared", "c10d"))
    assert sums_may_differ([over_sockets], torch.device("cpu")) and sums_may_differ([there], torch.device("cuda"))
    assert not sums_may_differ([there], torch.device("cpu"))


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("vocab_size", [117, 118])  # uneven shares of the embedding shift what lies beside it
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (6, 3)])  # all of a rank's, or one of its two
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_repeated_heads_where_state_is_sharded(vocab_size: int, heads: int, kv_heads: int, shard: str) -> None:
    model = small_gpt(vocab_size=vocab_size, hidden=24, heads=heads, kv_heads=kv_heads, tied=False)
    plan = tensor_plan(2, data=2, shard=shard, microbatches=2, sequence=True, clip_norm=0.1)
    batches = [token_batch(8, seed=seed) for seed in range(2)]
    verify(model, plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, dtype=torch.float64).require()


@pytest.mark.parametrize("vocab_size", [17, 117])
def test_uneven_parts_shift_what_is_in_a_buffer_with_them(vocab_size: int) -> None:
    model = small_gpt(vocab_size=vocab_size, tied=False)
    blueprint, names = find_blueprint(model), {name for name, _ in model.named_parameters()}
    assert blueprint.regions is not None
    shares = make_shares(blueprint.regions, 2)

    def misaligned(shard: str, data: int = 2) -> frozenset[str]:
        return find_misaligned(model, blueprint.blocks, shares, tensor_plan(2, data=data, shard=shard))

    assert shares.uneven == {"embedding.weight", "head.weight"}
    assert misaligned("parameters") == {"embedding.weight", "norm.weight", "head.weight"}, "blocks are even"
    assert misaligned("optimizer") == names and misaligned("nothing") == misaligned("optimizer", data=1) == frozenset()


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_what_holders_share_lies_alike_beside_other_parameters(shard: str) -> None:
    def held(name: str, numel: int) -> ParameterSpec:
        return ParameterSpec(name=name, shape=(numel,), holders="both")

    plan = data_plan(4, shard=shard, bucket_bytes=400)
    ours = [held("a", 70), ParameterSpec(name="mine", shape=(999,)), held("b", 50), held("c", 9)]
    theirs = [held("a", 70), held("b", 50), held("c", 9), ParameterSpec(name="other", shape=(31,))]
    found = [[one for one in flat_buffers(each, plan) if set(one.names) & set("abc")] for each in (ours, theirs)]
    assert found[0] == found[1] and {name for one in found[0] for name in one.names} == {"a", "b", "c"}
