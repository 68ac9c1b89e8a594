"""The divergence check: what differs between replicas, be it one bit, is named with its rank, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, cut_evenly, data_plan, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from ranks import ranks
from torch import Tensor

from weft.comm.group import Group
from weft.errors import DivergenceError
from weft.training.step import divergence
from weft.training.step.divergence import _gather, checksum
from weft.training.trainer import Trainer


def convnet_trainer(**changes: Any) -> Trainer:
    plan = data_plan(dist.get_world_size(), **{"check_every": 0, **changes})
    trainer = make_trainer(small_convnet(), plan, optimizer=ADAMW)
    for number in range(2):
        step(trainer, number)
    return trainer


def step(trainer: Trainer, seed: int = 0) -> None:
    images, classes = image_batch(8, seed=seed)
    trainer.step(*cut_evenly((images.float(), classes), trainer.data_size)[trainer.data_rank])


def a_weight(trainer: Trainer) -> Tensor:
    return trainer.model.get_parameter("blocks.0.conv2.weight").detach()


def a_buffer(trainer: Trainer) -> Tensor:
    return trainer.model.get_buffer("stem_norm.running_var")


def kept(trainer: Trainer, parameter: str, key: str) -> Tensor:
    """An entry of the optimizer's state."""
    return trainer.optimizer.state[trainer.model.get_parameter(parameter)][key]


PLACES: dict[str, Callable[[Trainer], Tensor]] = {
    "weight blocks.0.conv2.weight": a_weight,
    "optimizer state head.weight.exp_avg_sq": lambda trainer: kept(trainer, "head.weight", "exp_avg_sq"),
    "optimizer state stem.weight.step": lambda trainer: kept(trainer, "stem.weight", "step"),
    "buffer stem_norm.running_var": a_buffer,
    "buffer stem_norm.num_batches_tracked": lambda trainer: trainer.model.get_buffer("stem_norm.num_batches_tracked"),
}


def flip_bit(tensor: Tensor, word: int, bit: int) -> None:
    """Change one bit of one entry, in place."""
    words = tensor.view(-1).view({4: torch.int32, 8: torch.int64}[tensor.element_size()])
    words[word] ^= 1 << bit


@pytest.mark.sampled(2)
@ranks(4)
@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("what", PLACES)
def test_one_changed_bit_is_named_on_every_rank(what: str, culprit: int) -> None:
    trainer = convnet_trainer()
    trainer.check_divergence()
    if trainer.data_rank == culprit:
        flip_bit(PLACES[what](trainer), word=-1, bit=0)
    others = ", ".join(str(rank) for rank in range(4) if rank != culprit)
    with pytest.raises(DivergenceError) as caught:
        trainer.check_divergence()
    assert f"after step 2 replicas are not equal: {what} on rank {culprit} differs from rank {others}; " in str(
        caught.value
    )


@ranks(2)
@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_both_are_named(culprit: int) -> None:
    """Two cannot tell which of them is wrong."""
    trainer = convnet_trainer()
    if trainer.data_rank == culprit:
        a_weight(trainer).view(-1)[3] += 1e-3
    with pytest.raises(DivergenceError, match=r"blocks\.0\.conv2\.weight on rank 1 differs from rank 0; go back"):
        trainer.check_divergence()


@ranks(4)
def test_the_first_of_several_is_named_and_the_rest_are_counted() -> None:
    trainer = convnet_trainer()
    if trainer.data_rank in (1, 3):
        a_weight(trainer).view(-1)[0] += trainer.data_rank  # each in its own way
        a_buffer(trainer).fill_(7)
    with pytest.raises(DivergenceError, match=r"conv2\.weight on rank 1, 3 differs from rank 0, 2 \(1 more tensor"):
        trainer.check_divergence()


@ranks(2)
def test_a_rank_with_more_state_is_named() -> None:
    """One whose optimizer never saw a parameter has fewer tensors; lines must not be compared out of step."""
    trainer = convnet_trainer()
    if trainer.data_rank == 1:
        del trainer.optimizer.state[trainer.model.get_parameter("head.bias")]
    with pytest.raises(DivergenceError, match="number of tensors in the optimizer state on rank 1"):
        trainer.check_divergence()


@ranks(2)
def test_the_same_number_of_other_tensors_is_noticed() -> None:
    trainer = convnet_trainer()
    state = trainer.optimizer.state[trainer.model.get_parameter("head.bias")]
    if trainer.data_rank == 1:
        state["other"] = state.pop("exp_avg")
    with pytest.raises(DivergenceError, match="the list of tensors on rank 1"):
        trainer.check_divergence()


@ranks(2)
def test_numbers_that_are_no_numbers_may_be_equal() -> None:
    """NaN differs from itself, its bits do not; and zeros of both signs are equal, their bits are not."""
    trainer = convnet_trainer()
    a_weight(trainer).fill_(float("nan"))
    kept(trainer, "head.weight", "exp_avg_sq").fill_(float("inf"))
    trainer.check_divergence()
    a_buffer(trainer).fill_(-0.0 if trainer.data_rank else 0.0)
    with pytest.raises(DivergenceError, match=r"stem_norm\.running_var"):
        trainer.check_divergence()


@ranks(2)
def test_local_buffers_are_not_compared_but_weights_are() -> None:
    trainer = convnet_trainer(buffers="local")
    a_buffer(trainer).fill_(trainer.data_rank)
    trainer.check_divergence()
    if trainer.data_rank == 1:
        flip_bit(a_weight(trainer), word=5, bit=30)
    with pytest.raises(DivergenceError, match=r"conv2\.weight"):
        trainer.check_divergence()


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize(("check_every", "raised_at"), [(1, 3), (3, 3), (4, 4), (5, 5), (0, None)])
def test_a_step_checks_when_the_plan_says(check_every: int, raised_at: int | None) -> None:
    """Corrupted after two steps; found by the first step whose number the period divides, or never."""
    trainer = convnet_trainer(check_every=check_every)
    if trainer.data_rank == 1:
        flip_bit(a_weight(trainer), word=0, bit=12)
    for number in range(3, 7):
        if number == raised_at:
            with pytest.raises(DivergenceError, match=f"after step {number} "):
                step(trainer, number)
            return
        step(trainer, number)
    assert raised_at is None and trainer.steps_done == 6


@ranks(2)
def test_a_layer_with_state_of_its_own_is_found_in_training() -> None:
    """The purpose of the check: a layer whose state drifts apart between ranks."""
    model = small_gpt()
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, inputs: module.seen.add_(inputs[0].sum()) and None)
    trainer = make_trainer(model, data_plan(2, check_every=2))
    trainer.step(*cut_evenly(token_batch(4), 2)[trainer.data_rank])
    with pytest.raises(DivergenceError, match="after step 2 .* buffer seen on rank 1"):
        trainer.step(*cut_evenly(token_batch(4), 2)[trainer.data_rank])


@contextmanager
def counted_comparisons() -> Iterator[list[tuple[int, int]]]:
    """The comparisons that divergence checks make inside: the number of ranks and of checksums of each."""
    made: list[tuple[int, int]] = []

    def gather(values: Tensor, group: Group) -> Tensor:
        table = _gather(values, group)
        if len(table[0]) > 1:  # the gather before it, of lengths, has one number per rank
            made.append((len(table), len(table[0]) - 1))
        return table

    with mock.patch.object(divergence, "_gather", gather):
        yield made


def train_healthily(data: int) -> None:
    """Uneven and empty parts, frozen and unused parameters, every step checked."""
    model = small_convnet()
    model.head.bias.requires_grad_(False)
    model.register_parameter("unused", torch.nn.Parameter(torch.randn(3)))
    trainer = make_trainer(model, data_plan(data, check_every=1, clip_norm=0.5), optimizer=ADAMW)
    sizes = (8, 5, 1, 2, 8)
    with counted_comparisons() as made:
        for number, size in enumerate(sizes):
            images, classes = image_batch(size, seed=number)
            trainer.step(*cut_evenly((images.float(), classes), data)[trainer.data_rank])
    state = [value for each in trainer.optimizer.state.values() for value in each.values()]
    num_tensors = len([*model.parameters(), *model.buffers(), *state])
    assert made == [(data, num_tensors)] * len(sizes), "all weights, buffers and moments, after every step"


@pytest.mark.parametrize("data", [2, 4])
def test_healthy_ranks_are_equal_after_every_step(data: int) -> None:
    ranks(data)(train_healthily)(data=data)


@ranks(4)
def test_a_long_float32_run_stays_equal_to_the_bit() -> None:
    trainer = make_trainer(small_gpt(), data_plan(4, check_every=10, bucket_bytes=1000), optimizer=ADAMW)
    with counted_comparisons() as made:
        for number in range(20):
            trainer.step(*cut_evenly(token_batch(7, seed=number), 4)[trainer.data_rank])
    assert [num_ranks for num_ranks, _ in made] == [4, 4], "after steps 10 and 20"


# ---- the checksum by itself ----

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
def test_every_single_bit_changes_a_checksum(dtype: torch.dtype, numel: int) -> None:
    tensor = (torch.randn(numel) * 100).to(dtype)
    before = checksum(tensor)
    words = tensor.view(torch.uint8)
    for place in {0, words.numel() // 2, words.numel() - 1}:
        for bit in range(8 if dtype != torch.bool else 1):
            words[place] ^= 1 << bit
            assert checksum(tensor) != before, f"bit {bit} of byte {place}"
            words[place] ^= 1 << bit
    assert checksum(tensor) == before


def test_a_checksum_depends_on_the_place_and_not_on_the_strides() -> None:
    tensor = torch.randn(16, 8)
    swapped = tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    assert checksum(swapped) != checksum(tensor)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.empty(0)) == 0 and checksum(torch.tensor(1.5)) == checksum(torch.tensor([1.5]))
