"""Ways in which sharded layers could be silently wrong: each is right, or refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import verify
from oracle import (
    ADAMW,
    cross_entropy,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.blueprint import Blueprint
from weft.errors import ModelError
from weft.models.gpt import GPT
from weft.plan.partition.tensor import Region
from weft.plan.plan import Plan


def verified(model: nn.Module, plan: Plan, batches: list[Any]) -> None:
    verify(model, plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, device="cpu").require()


class ImageNet(nn.Module):
    """BatchNorm, which waits for ranks without samples, and split layers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(64, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(F.relu(self.norm(self.conv(x))).flatten(1))))


@ranks(4)
def test_a_rank_without_samples_keeps_step() -> None:
    verified(ImageNet(), tensor_plan(2, data=2, clip_norm=0.1), [image_batch(4), image_batch(1, seed=2)])
    verified(small_gpt(), tensor_plan(2, data=2, sequence=True, microbatches=2), [token_batch(4), token_batch(1)])


@ranks(2)
def test_tokens_outside_the_vocabulary_are_refused_as_in_one_process() -> None:
    trainer = make_trainer(small_gpt(), tensor_plan(2))
    inputs, targets = token_batch(2)
    for wrong in (17, -1):
        with pytest.raises(IndexError, match=f"token {wrong} is outside the vocabulary of 17 entries"):
            trainer.step(inputs.index_fill(1, torch.tensor([3]), wrong), targets)


@ranks(2)
def test_callers_of_the_model_get_the_whole_output() -> None:
    torch.manual_seed(0)
    whole = small_gpt().double()
    trainer = make_trainer(copy.deepcopy(whole), tensor_plan(2))
    inputs = token_batch(2)[0]
    with torch.inference_mode():
        torch.testing.assert_close(trainer.model(inputs), whole(inputs), rtol=1e-12, atol=1e-12)
    with pytest.raises(ModelError, match=r"call trainer.save\(directory\)"):
        trainer.model.state_dict()


class Checkpointing(GPT):
    """A model with its own activation recomputation."""

    how: bool | None = None

    def forward(self, tokens_BT: Tensor, positions_T: Tensor | None = None) -> Tensor:
        x, rotary = self.embed(tokens_BT, positions_T)
        for block in self.blocks:
            again = self.training and self.how is not None
            x = checkpoint(block, x, rotary, use_reentrant=self.how) if again else block(x, rotary)
        return self.head(self.norm(x))


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize(
    "plan", [data_plan(2), tensor_plan(2), tensor_plan(2, sequence=True)], ids=["data", "tensor", "tokens"]
)
def test_a_model_that_recomputes_by_itself_drops_the_same(plan: Plan) -> None:
    weights = []
    for how in (None, False, True):
        torch.manual_seed(0)
        model = Checkpointing(small_gpt(dropout=0.3).config).double()
        model.how = how
        trainer = make_trainer(model, plan)
        torch.manual_seed(1)
        for seed in range(2):
            trainer.step(*cut_evenly(token_batch(4, seed=seed), trainer.data_size)[trainer.data_rank])
        weights.append([parameter.detach() for parameter in model.parameters()])
    for kept, plain, reentrant in zip(*weights, strict=True):
        torch.testing.assert_close(plain, kept, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(reentrant, kept, rtol=1e-12, atol=1e-12)


class Frozen(nn.Module):
    """One of three layers that share an input is called without gradients."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.embedding, self.which = nn.Embedding(17, 16), which
        self.layers, self.down = nn.ModuleList(nn.Linear(16, 24) for _ in range(3)), nn.Linear(24, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        made = []
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(torch.is_grad_enabled() and number != self.which):
                made.append(layer(x))
        return self.down(F.gelu(made[0]) * made[1] + made[2])


@ranks(2)
@pytest.mark.parametrize("which", [0, 1])
def test_layers_called_in_different_modes(which: int) -> None:
    verified(Frozen(which), tensor_plan(2), [token_batch(3), token_batch(2, seed=1)])


@ranks(2)
def test_an_unused_layer_has_no_gradient() -> None:
    """Its output is computed, but not used."""

    class Wasteful(Frozen):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            first, second, _ = (layer(x) for layer in self.layers)
            return self.down(F.gelu(first) * second)

    verified(Wasteful(-1), tensor_plan(2), [token_batch(3)])


def misdeclared(change: str) -> GPT:
    model = small_gpt()
    declared = model.weft_blueprint()
    assert declared.regions is not None
    region = next(region for region in declared.regions if "mlp" in region.rows[0])
    first, second = region.cuts
    wrong: Region = {
        "an unknown layer": replace(region, rows=("blocks.0.mlp.dwon",)),
        "an unknown tensor": replace(region, cuts=(replace(first, name="blocks.0.mlp.up.weigth"), second)),
        "another length": replace(
            region, cuts=(first, replace(second, sections=(replace(second.sections[0], num_units=20),)))
        ),
        "another dim": replace(region, cuts=(first, replace(second, dim=2))),
        "a weight left whole": replace(region, cuts=(second,)),
    }[change]
    blueprint = Blueprint(blocks=declared.blocks, regions=(wrong,))
    model.weft_blueprint = lambda: blueprint  # type: ignore[method-assign]
    return model


@ranks(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("an unknown layer", 'the module "blocks.0.mlp.dwon", which the model lacks'),
        ("an unknown tensor", 'the tensor "blocks.0.mlp.up.weigth", which the model lacks'),
        ("another length", "into sections of 20 entries together, and its shape is (16, 24)"),
        ("another dim", 'cuts dim 2 of "blocks.0.mlp.down.weight"'),
        ("a weight left whole", 'has "blocks.0.mlp.up" make shares, but does not cut its "weight"'),
    ],
)
def test_a_declaration_that_does_not_fit_the_model_is_refused(change: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        make_trainer(misdeclared(change), tensor_plan(2))
    assert words in str(caught.value)


class Shifting(nn.Module):
    """Blocks that look at the token before, in a model that returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = small_gpt()
        for number, block in enumerate(self.gpt.blocks):
            self.gpt.blocks[number] = Shift(block)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, rotary = self.gpt.embed(tokens)
        for block in self.gpt.blocks:
            x = block(x, rotary)
        return self.gpt.head(self.gpt.norm(x)), x.mean()


class Shift(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        return self.block(x + x.roll(1, dims=1), rotary)


@ranks(2)
def test_a_model_of_several_outputs_is_tried_too() -> None:
    with pytest.raises(ModelError, match=r"computes something else than the whole one|the model fails on the example"):
        make_trainer(
            Shifting(),
            tensor_plan(2, sequence=True),
            loss=lambda output, targets: cross_entropy(output[0], targets),
            example=token_batch(2)[0],
        )
