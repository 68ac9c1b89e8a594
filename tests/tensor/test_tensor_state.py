"""Tensor parallelism around the steps: checkpoints under any plan, first values, evaluation, generation, checks."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import (
    ADAMW,
    cross_entropy,
    data_plan,
    make_trainer,
    small_gpt,
    tensor_plan,
    token_batch,
    train_on_tokens,
)
from ranks import ranks
from safetensors.torch import load_file
from torch import nn
from whole_tensors import whole_tensors

from weft.checkpoint.local_parts import Held, held_parameters
from weft.errors import DataError, DivergenceError
from weft.models.gpt import GPT
from weft.parallel.tensor.shares import local_part
from weft.plan.plan import Plan, Precision
from weft.training.trainer import Trainer

gpt = functools.partial(small_gpt, heads=4, kv_heads=1, norm="layer", bias=True)


def gpt_trainer(plan: Plan, model: nn.Module | None = None, **changes: Any) -> Trainer:
    torch.manual_seed(3)
    made = gpt(tied=False).double() if model is None else model
    return make_trainer(made, plan, **{"optimizer": ADAMW, "example": token_batch(2)[0], **changes})


PLANS = {
    "tensor 4": tensor_plan(4, sequence=True, clip_norm=0.3),
    "tensor 2 x zero 2": tensor_plan(2, data=2, shard="gradients", clip_norm=0.3),
    "tensor 2 x zero 3": tensor_plan(2, data=2, shard="parameters", clip_norm=0.3),
    "tensor 2 x pipeline 2": tensor_plan(2, pipeline=2, microbatches=2, cuts=(1,), clip_norm=0.3),
    "data 4": data_plan(4, clip_norm=0.3),
}
PAIRS = [
    ("tensor 4", "tensor 2 x zero 3"),
    ("tensor 2 x zero 3", "tensor 2 x pipeline 2"),
    ("tensor 2 x pipeline 2", "data 4"),
    ("data 4", "tensor 4"),
    ("tensor 2 x zero 2", "tensor 4"),
]


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_checkpoint_of_one_plan_goes_on_under_another(here: str, there: str, tmp_path: Path) -> None:
    saved = gpt_trainer(PLANS[here])
    train_on_tokens(saved, 2)
    saved.save(tmp_path / "saved")
    expected = train_on_tokens(saved, 2)
    other = gpt_trainer(PLANS[there])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.checkpoint.load.log.warning", lambda *_: None)
        other.load(tmp_path / "saved")
    assert train_on_tokens(other, 2) == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("name", ["tensor 4", "tensor 2 x zero 3"])
def test_the_same_plan_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    def make() -> Trainer:
        return gpt_trainer(PLANS[name], gpt(dropout=0.2).double())

    saved = make()
    train_on_tokens(saved, 2)
    saved.save(tmp_path / "saved")
    losses = train_on_tokens(saved, 2)
    again = make()
    again.load(tmp_path / "saved")
    assert train_on_tokens(again, 2) == losses
    for one, other in zip(saved.sync.pieces, again.sync.pieces, strict=True):
        assert torch.equal(one.tensor, other.tensor)


@ranks(2)
def test_files_hold_whole_tensors_under_the_models_names(tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = gpt(tied=False).double()
    gpt_trainer(tensor_plan(2)).save(tmp_path / "saved")
    found: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "saved").glob("model-*.safetensors")):
        found |= load_file(file)
    assert found.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in whole.named_parameters())


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_first_values_do_not_depend_on_the_degree(shard: str) -> None:
    """A model without memory: the whole matrix is made, then cut."""

    def made(plan: Plan) -> tuple[Trainer, dict[str, Held]]:
        with torch.device("meta"):
            model = gpt().double()
        trainer = gpt_trainer(plan, model, example=None)
        return trainer, held_parameters(trainer.named_model, trainer.sync, trainer.layouts)

    whole, ours = made(data_plan(4, shard=shard))
    split, theirs = made(tensor_plan(2, data=2, shard=shard))
    everything = dict(whole_tensors(ours, whole.mesh, lambda _, one: one.tensor.clone()))
    for name, part in theirs.items():
        expected = local_part(everything[name], part.layout, split.mesh.grid, dist.get_rank())
        assert torch.equal(part.tensor.flatten(), expected.flatten()), name
    assert train_on_tokens(split, 2) == pytest.approx(train_on_tokens(whole, 2), rel=1e-10)


@ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_evaluation_and_generation_are_one_processs(sequence: bool) -> None:
    torch.manual_seed(3)
    alone = gpt(tied=False).double()
    trainer = gpt_trainer(tensor_plan(2, sequence=sequence))
    batches = [token_batch(3, seed=1), token_batch(2, seed=2)]
    with torch.no_grad():
        terms = [cross_entropy(alone(inputs), targets) for inputs, targets in batches]
    expected = float(sum(total for total, _ in terms) / sum(count for _, count in terms))
    assert trainer.evaluate(batches) == pytest.approx(expected, rel=1e-12)
    tokens = trainer.generate([1, 2, 3], num_tokens=6, context=8, temperature=0.0)
    window = [1, 2, 3]
    with torch.no_grad():
        for _ in range(6):
            window.append(int(alone(torch.tensor([window[-8:]]))[0, -1].argmax()))
    assert tokens == window


@ranks(2)
def test_ranks_that_drift_apart_are_named() -> None:
    trainer = gpt_trainer(tensor_plan(2))
    train_on_tokens(trainer, 1)
    trainer.check_divergence()
    if dist.get_rank() == 1:
        with torch.no_grad():
            trainer.named_model.norm.weight[0] += 1e-7
    with pytest.raises(DivergenceError, match=r"norm\.weight on rank 1 differs from rank 0"):
        trainer.check_divergence()


@ranks(2)
def test_tokens_that_cannot_be_shared_out_are_refused_in_training() -> None:
    trainer = gpt_trainer(tensor_plan(2, sequence=True))
    inputs, targets = token_batch(2)
    with pytest.raises(DataError, match="cannot split 7 tokens over .* tensor = 2; use sequences of 6 or 8"):
        trainer.step(inputs[:, :7], targets[:, :7])


@ranks(2)
def test_a_copy_of_the_model_runs_by_itself() -> None:
    trainer = gpt_trainer(tensor_plan(2))
    copied = copy.deepcopy(trainer.model)
    assert isinstance(copied, GPT)
    inputs = token_batch(2)[0]
    with torch.no_grad():
        before = trainer.model(inputs)
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(trainer.model(inputs), before)
        assert not copied(inputs).any()


@ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_mixed_precision_trains_split_layers(sequence: bool) -> None:
    plan = replace(tensor_plan(2, sequence=sequence), precision=Precision(compute="bf16"))
    torch.manual_seed(3)
    trainer = gpt_trainer(plan, gpt())
    losses = train_on_tokens(trainer, 3)
    whole = train_on_tokens(gpt_trainer(tensor_plan(2, sequence=sequence), gpt()), 3)
    assert losses == pytest.approx(whole, rel=2e-2)
