"""What is whole at which moment under ZeRO-3, and what happens to it outside of steps, and after steps that failed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Batch, cross_entropy, cut_evenly, data_plan, make_trainer, small_gpt, token_batch, train_alone
from ranks import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.parallel.zero.flat_parameters import FlatParameters
from weft.plan.plan import Plan, Recompute
from weft.training.trainer import Trainer


def stage3(**changes: Any) -> Plan:
    return data_plan(2, shard="parameters", **changes)


def batches(*sizes: int) -> list[Batch]:
    return [token_batch(size, seed=seed) for seed, size in enumerate(sizes)]


# ---- what is whole, and when ----


class Spy:
    """Watches flat buffers: the most blocks that were whole at once, and what is whole now."""

    def __init__(self, trainer: Trainer) -> None:
        self.flats = trainer.sync.flats
        self.most_blocks = 0

    def whole(self) -> list[str]:
        """The first name in each flat buffer that can be used: it has memory beyond this rank's part, or common one."""
        for flat in self.flats:
            assert flat.is_common or flat.is_whole == (flat.whole.untyped_storage().nbytes() > 0)
        return [flat.names[0] for flat in self.flats if flat.is_whole]

    @contextmanager
    def watching(self) -> Iterator[None]:
        original = FlatParameters.start_gather

        def start_gather(flat: FlatParameters) -> None:
            original(flat)
            self.most_blocks = max(self.most_blocks, sum(name.startswith("blocks") for name in self.whole()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FlatParameters, "start_gather", start_gather)
            yield


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_root_and_two_blocks_are_whole_at_most(microbatches: int, policy: str) -> None:
    plan = stage3(microbatches=microbatches, reshard="microbatch")
    trainer = make_trainer(small_gpt(num_layers=5), dataclasses.replace(plan, recompute=Recompute(policy=policy)))
    spy = Spy(trainer)
    assert spy.whole() == []
    with spy.watching():
        for size in (4, 1):
            trainer.step(*cut_evenly(token_batch(size), 2)[trainer.data_rank])
            assert spy.whole() == []
        assert spy.most_blocks == 2
        trainer.evaluate([token_batch(4)])
        assert spy.whole() == []
        trainer.generate([1, 2], num_tokens=2, context=8)
        assert spy.whole() == [] and spy.most_blocks == 2
        with torch.no_grad():
            trainer.model(token_batch(2)[0])
        assert spy.whole() == [] and spy.most_blocks == 2


class Six(nn.Module):
    """Six blocks, of which the user skips the middle, or recomputes two at a time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 17)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.how == "skips":
            x = self.blocks[5](self.blocks[0](x))
        for start in range(0, 6, 2) if self.how == "recomputes" else ():
            x = checkpoint(nn.Sequential(*self.blocks[start : start + 2]), x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


@ranks(2)
@pytest.mark.parametrize(("how", "most_blocks"), [("skips", 2), ("recomputes", 3)])
def test_no_more_are_whole_where_blocks_are_skipped_or_recomputed_together(how: str, most_blocks: int) -> None:
    trainer = make_trainer(Six(how), stage3())
    spy = Spy(trainer)
    with spy.watching():
        trainer.step(*token_batch(4))
    assert spy.most_blocks <= most_blocks and spy.whole() == []


@ranks(2)
def test_all_stay_from_the_first_micro_batch_to_the_last_if_the_plan_says_so() -> None:
    trainer = make_trainer(small_gpt(num_layers=5), stage3(microbatches=2))
    spy = Spy(trainer)
    with spy.watching():
        trainer.step(*token_batch(4))
    assert spy.most_blocks == 5 and spy.whole() == []


USES = {
    "a linear layer": lambda model: model.blocks[0].mlp.up(torch.ones(1, 16)),
    "an embedding": lambda model: model.embedding(torch.tensor([1])),
    "a norm": lambda model: model.norm(torch.ones(2, 16)),
    "a product": lambda model: model.head.weight @ torch.ones(16),
    "a sum": lambda model: model.blocks[0].mlp.up.weight + torch.ones(24, 16),
}


@ranks(2)
@pytest.mark.parametrize("use", USES)
def test_a_parameter_outside_its_turn_is_an_error(use: str) -> None:
    trainer = make_trainer(small_gpt(), stage3())
    trainer.step(*token_batch(2))
    with pytest.raises(RuntimeError):
        USES[use](trainer.model)


@ranks(2)
def test_a_reduction_over_parameters_outside_their_turn_is_not_silently_small() -> None:
    """A penalty on all weights, say, of which a rank has none: nothing may pass for its value."""
    trainer = make_trainer(small_gpt(), stage3())
    trainer.step(*token_batch(2))
    assert all(parameter.detach().square().sum().isnan() for parameter in trainer.model.parameters())


# ---- outside of steps ----


@ranks(2)
@pytest.mark.parametrize("others", [(5, 2), ()])
def test_evaluation_with_unequal_numbers_of_batches(others: tuple[int, ...]) -> None:
    model = small_gpt().double()
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, stage3(microbatches=2))
    mine, theirs = batches(2, 3, 1), [token_batch(size, seed=10 + size) for size in others]
    found = trainer.evaluate(mine if trainer.data_rank == 1 else theirs)
    with torch.no_grad():
        terms = [cross_entropy(alone(inputs), targets) for inputs, targets in (*mine, *theirs)]
    assert found == pytest.approx(float(sum(t for t, _ in terms) / sum(n for _, n in terms)), rel=1e-12)


@ranks(2)
def test_the_model_outside_of_steps_is_the_trained_one() -> None:
    model = small_gpt().double()
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, stage3())
    steps = batches(4, 4)
    for step in steps:
        trainer.step(*cut_evenly(step, 2)[trainer.data_rank])
        trainer.model(step[0])  # with gradients in mind, and then not
    train_alone(alone, steps)
    tokens = token_batch(3, seed=9)[0]
    torch.testing.assert_close(trainer.model(tokens), alone(tokens), rtol=1e-12, atol=1e-12)
    alone.eval()
    likeliest = {"num_tokens": 4, "context": 8, "temperature": 0.0}
    assert trainer.generate([3], **likeliest) == make_trainer(alone, data_plan(2)).generate([3], **likeliest)


@ranks(2)
def test_weights_that_are_loaded_while_a_part_is_whole_are_seen(tmp_path: Path) -> None:
    trainer = make_trainer(small_gpt().double(), stage3())
    trainer.save(tmp_path / "saved")
    before = trainer.evaluate([token_batch(4)])
    trainer.step(*token_batch(4))
    trainer.model(token_batch(4)[0])  # the root stays whole, since a backward pass could follow
    trainer.load(tmp_path / "saved")
    assert trainer.evaluate([token_batch(4)]) == before


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in the backward pass")


class Interrupted(nn.Module):
    """Fails where it is told to."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.embedding(tokens)).tanh()).tanh()
        if self.where == "forward":
            raise ArithmeticError("in the forward pass")
        x = Failing.apply(x) if self.where == "backward" else x
        logits: Tensor = self.head(self.blocks[2](x).tanh())
        return logits


def check_goes_on(shard: str, interrupt: Callable[[Trainer, Interrupted], None]) -> None:
    """A step, an interruption, two steps: the losses of one process that saw nothing but the steps."""
    model = Interrupted().double()
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, data_plan(2, shard=shard, bucket_bytes=256))
    losses = []
    for number, step in enumerate(batches(4, 4, 4)):
        if number == 1:
            interrupt(trainer, model)
        losses.append(float(trainer.step(*cut_evenly(step, 2)[trainer.data_rank])))
    assert losses == pytest.approx([seen.loss for seen in train_alone(alone, batches(4, 4, 4))], rel=1e-12)


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("shard", ["nothing", "optimizer", "gradients", "parameters"])
def test_a_step_that_failed_on_all_ranks_leaves_nothing_behind(shard: str, where: str) -> None:
    def interrupt(trainer: Trainer, model: Interrupted) -> None:
        model.where = where
        with pytest.raises(ArithmeticError):
            trainer.step(*token_batch(2))
        model.where = ""

    check_goes_on(shard, interrupt)


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "optimizer", "gradients", "parameters"])
def test_a_backward_pass_of_the_users_own_exchanges_nothing(shard: str) -> None:
    def interrupt(trainer: Trainer, model: Interrupted) -> None:
        if trainer.data_rank == 0 or shard == "parameters":  # there the forward pass is collective
            trainer.model(token_batch(2)[0]).sum().backward()

    check_goes_on(shard, interrupt)
