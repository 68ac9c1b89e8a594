"""A wrong factor in any axis, and other faults: `verify` must fail and name the axis from values alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, data_plan, pipeline_plan, sequence_plan, tensor_plan
from planting import Patch, after_exchange, find, in_exchange, scaled, without
from ranks import ranks

from weft.comm.group import Group
from weft.parallel.attention import attention_call as split_attention
from weft.parallel.attention import ring
from weft.parallel.pipeline.executor import Pipeline
from weft.sync.allreduce import AllReduce
from weft.training.trainer import Trainer

# ---- a factor in each axis ----


@ranks(2)
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_data(factor: float) -> None:
    first = find(data_plan(2), scaled(factor))
    assert (first.step, first.phase, first.what, first.ranks) == (1, "backward", "gradient", (0, 1))
    assert (first.cause.kind, first.cause.axes) == ("factor", ("data",))
    assert f"too {'large' if factor > 1 else 'small'} by exactly 2, the degree of [axes] data" in first.cause.text
    assert first.places == "every rank" and first.name == "norm.weight", "the nearest to the loss: the head is tied"


@ranks(2)
def test_replicate() -> None:
    plan = data_plan(1, shard="gradients", replicate=2)
    first = find(plan, in_exchange("weft.sync.zero_gradients.all_reduce", 2.0, axis="replicate"))
    assert (first.what, first.cause.kind, first.cause.axes) == ("gradient", "factor", ("replicate",))


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_the_axis_that_zero_shards_over(shard: str) -> None:
    plan = data_plan(2, shard=shard)
    first = find(plan, in_exchange("weft.sync.zero_gradients.reduce_scatter", 2.0, axis="data", position=1))
    assert (first.what, first.cause.kind, first.cause.axes) == ("gradient", "factor", ("data",))


@ranks(2)
def test_microbatches_of_a_pipeline() -> None:
    first = find(pipeline_plan(2, microbatches=3), scaled(3.0))
    assert (first.what, first.cause.kind, first.cause.axes) == ("gradient", "factor", ("microbatches",))
    assert "[step] microbatches" in first.cause.text and "every gradient" in first.cause.text


def cross_stages(patch: Patch, trainer: Trainer) -> None:
    """Gradients that come from the next stage are too large by the number of stages."""
    real = Pipeline._incoming_gradients

    def incoming(self: Any, action: Any, flight: Any) -> list[torch.Tensor]:
        found = real(self, action, flight)
        return found if action.stage == 1 else [2.0 * one for one in found]

    patch.setattr(Pipeline, "_incoming_gradients", incoming)


@ranks(4)
def test_pipeline_and_not_data_of_the_same_degree() -> None:
    first = find(pipeline_plan(2, data=2, microbatches=3), cross_stages, tied=False)
    assert first.cause.kind == "factor" and first.cause.axes[0] == "pipeline", first
    assert "all gradients of pipeline stage 0 are off by it" in first.cause.text
    assert first.ranks == (0, 1) and first.name.startswith("blocks.0.")


TENSOR_BACKWARD = in_exchange("weft.parallel.tensor.functions.all_reduce", 2.0, axis="tensor", wait=True)


@ranks(2)
def test_tensor() -> None:
    first = find(tensor_plan(2), TENSOR_BACKWARD)
    assert (first.what, first.cause.kind, first.cause.axes) == ("gradient", "factor", ("tensor",))
    assert first.name == "norm.weight", "the head is sharded too, and this is next to it"


@ranks(4)
def test_tensor_and_not_data_of_the_same_degree() -> None:
    first = find(tensor_plan(2, data=2), TENSOR_BACKWARD)
    assert first.cause.kind == "factor" and first.cause.axes == ("tensor", "data"), first
    assert "as from an exchange inside the model" in first.cause.text


@ranks(4)
def test_data_and_not_tensor_of_the_same_degree() -> None:
    first = find(tensor_plan(2, data=2), scaled(2.0))
    assert first.cause.kind == "factor" and first.cause.axes == ("data", "tensor"), first
    assert "every gradient is off by it" in first.cause.text


@ranks(2)
def test_tensor_forward() -> None:
    """A row layer's results are too large: the loss is off by no visible factor, but only one axis communicates."""
    first = find(tensor_plan(2), in_exchange("weft.parallel.tensor.functions.all_reduce", 2.0, axis="tensor"))
    assert (first.what, first.phase, first.cause.axes) == ("loss", "forward", ("tensor",))
    assert "these exchange in a forward pass: tensor" in first.cause.text


def ring_back(patch: Patch, trainer: Trainer) -> None:
    real = ring.rotate_with_gradients

    def back(*args: Any) -> Any:
        dk, dv = real(*args)
        return 2.0 * dk, 2.0 * dv

    patch.setattr(ring, "rotate_with_gradients", back)


@ranks(2)
def test_ring() -> None:
    first = find(sequence_plan(ring=2), ring_back)
    assert (first.what, first.cause.kind, first.cause.axes) == ("gradient", "factor", ("ring",)), first
    assert first.name.startswith("blocks.1.attention.") and "only entries 16 to 47 of 48" in first.cause.text


@ranks(2)
def test_ulysses() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        real = split_attention.to_tokens

        def back(tensors: Any, group: Group) -> Any:
            found = real(tensors, group)
            return [2.0 * one for one in found] if len(found) == 3 else found

        patch.setattr(split_attention, "to_tokens", back)

    first = find(sequence_plan(ulysses=2), plant)
    assert (first.what, first.cause.kind, first.cause.axes) == ("gradient", "factor", ("ulysses",)), first


@ranks(4)
def test_ring_times_ulysses() -> None:
    """The factor is the degree of two axes together, and of neither alone."""
    first = find(sequence_plan(ring=2, ulysses=2), scaled(4.0))
    assert first.cause.kind == "factor" and "[axes] ring × [axes] ulysses" in first.cause.text
    assert set(first.cause.axes) == {"ring", "ulysses"}


# ---- other faults ----


@ranks(2)
def test_replicas_that_were_not_summed() -> None:
    first = find(
        data_plan(1, shard="gradients", replicate=2), without("weft.sync.zero_gradients.all_reduce", "replicate")
    )
    assert (first.what, first.phase, first.cause.kind) == ("gradient", "exchange", "not summed"), first
    assert first.cause.axes == ("replicate",) and "whose sum is the true one" in first.cause.text


@ranks(4)
def test_data_that_was_not_summed_beside_tensor() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        sync, finish = trainer.sync, trainer.sync.finish
        assert isinstance(sync, AllReduce)
        sync._launch_full = lambda: None  # type: ignore[method-assign]  # nothing is sent before the backward pass ends

        def finish_without(*args: Any, **kwargs: Any) -> Any:
            kept = [piece.tensor.grad.clone() for piece in sync.pieces]
            totals = finish(*args, **kwargs)
            for piece, own in zip(sync.pieces, kept, strict=True):
                piece.tensor.grad.copy_(own)
            return totals

        sync.finish = finish_without  # type: ignore[method-assign]

    first = find(tensor_plan(2, data=2), plant)
    assert (first.phase, first.cause.kind, first.cause.axes) == ("exchange", "not summed", ("data",)), first


@ranks(2)
def test_an_update_that_one_rank_left_out() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        update = trainer.optimizer.step

        def step(*args: Any) -> None:
            kept = [piece.tensor.detach().clone() for piece in trainer.sync.pieces]
            update(*args)
            with torch.no_grad():
                for piece, weight in zip(trainer.sync.pieces, kept, strict=True):
                    piece.tensor.copy_(weight)

        if trainer.data_rank == 1:
            trainer.optimizer.step = step  # type: ignore[method-assign]

    first = find(data_plan(2), plant)
    assert (first.what, first.phase, first.cause.kind) == ("weight", "update", "stale"), first
    assert first.ranks == (1,) and first.places == "data 1 (rank 1)" and "did not move" in first.cause.text


@ranks(2)
def test_a_gradient_of_the_step_before() -> None:
    kept: dict[int, Any] = {}

    def late(trainer: Trainer) -> None:
        for number, piece in enumerate(trainer.sync.pieces):
            now = piece.tensor.grad.clone()
            if number in kept and trainer.steps_done == 1:
                piece.tensor.grad.copy_(kept[number])
            kept[number] = now

    first = find(data_plan(2), after_exchange(late), num_steps=3)
    assert (first.step, first.what, first.cause.kind) == (2, "gradient", "stale"), first


@ranks(2)
def test_a_share_that_went_to_the_wrong_rank() -> None:
    def swap(trainer: Trainer) -> None:
        piece = next(piece for piece in trainer.sync.pieces if piece.name == "blocks.1.mlp.up.weight")
        gradient = piece.tensor.grad.contiguous()
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient)
        piece.tensor.grad.copy_(both[1 - dist.get_rank()])

    first = find(tensor_plan(2), after_exchange(swap), optimizer=ADAMW)
    assert (first.name, first.cause.kind) == ("blocks.1.mlp.up.weight", "swapped"), first
    assert "rank 0 has rank 1's, rank 1 has rank 0's" in first.cause.text


@ranks(2)
def test_weights_that_were_not_published() -> None:
    """ZeRO: the optimizer updates its shard, and no rank gathers it."""

    def forget(patch: Patch, trainer: Trainer) -> None:
        trainer.sync.publish = lambda: None  # type: ignore[method-assign]

    first = find(data_plan(2, shard="optimizer"), forget)
    assert (first.what, first.phase, first.cause.kind) == ("weight", "update", "unpublished"), first
