"""Models and plans that tensor parallelism does not support are refused before the first step, with a remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import make_trainer, small_gpt, tensor_plan, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.blueprint import Blueprint
from weft.errors import WeftError
from weft.models.gpt import GPT
from weft.plan.partition.tensor import Cut, Region, Section
from weft.plan.plan import Plan


class Mixing(nn.Module):
    """A block that mixes features, so that nothing of it can be split; `trap` is what it does besides."""

    def __init__(self, trap: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16) if trap == "batch norm" else nn.LayerNorm(16)
        self.trap = trap

    def forward(self, x: Tensor) -> Tensor:
        if self.trap == "batch norm":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.trap == "shift":
            x = x + x.roll(1, dims=1)
        inner = self.first(x)
        if self.trap == "":
            inner = inner.softmax(-1)
        return x + self.second(inner.relu())


class Tower(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], *, shared: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 18)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = self.blocks[1].norm if shared else nn.LayerNorm(16)
        self.classes = nn.Linear(16, 3)
        self.register_buffer("mixing", torch.randn(3, 17))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[..., :16].tanh()
        for block in self.blocks:
            x = block(x)
        return self.classes(self.norm(x)) @ self.mixing


class Misdeclared(GPT):
    """Leaves out that attention counts heads."""

    def weft_blueprint(self) -> Blueprint:
        return Blueprint(
            blocks=("blocks.0", "blocks.1"),
            regions=(
                Region(
                    columns=(("blocks.0.mlp.up",),),
                    rows=("blocks.0.mlp.down",),
                    cuts=(
                        Cut(name="blocks.0.mlp.up.weight", dim=0, sections=(Section(num_units=24),)),
                        Cut(
                            name="blocks.0.mlp.down.weight",
                            dim=1,
                            sections=(Section(num_units=12), Section(num_units=12)),
                        ),
                    ),
                ),
            ),
        )


def half_tied() -> nn.Module:
    """One of two names of a parameter is declared, the other is used whole."""
    model = small_gpt(tied=True)
    declared = model.weft_blueprint()
    regions = tuple(region for region in declared.regions or () if not region.is_output)
    model.weft_blueprint = functools.partial(Blueprint, blocks=declared.blocks, regions=regions)  # type: ignore[method-assign]
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Plan, str]] = {
    "too few heads": (
        lambda: small_gpt(hidden=16, heads=1),
        tensor_plan(2),
        '"blocks.*.attention.out.weight" has 1 unit to share out',
    ),
    "nothing to split": (functools.partial(Tower, Mixing), tensor_plan(2), "no layer of the model can be split"),
    "tokens that are mixed": (
        lambda: Tower(lambda: Mixing("shift")),
        tensor_plan(2, sequence=True),
        "set [tensor] sequence = false",
    ),
    "a norm over tokens": (
        lambda: Tower(lambda: Mixing("batch norm")),
        tensor_plan(2, sequence=True),
        "normalises over the samples and tokens it sees",
    ),
    "a norm of a block and of the model": (
        lambda: Tower(lambda: Mixing("linear"), shared=True),
        tensor_plan(2, sequence=True),
        "belongs to a block and to the model outside of its blocks",
    ),
    "a declaration that is wrong": (
        lambda: Misdeclared(small_gpt().config),
        tensor_plan(2),
        "the model computes something else than the whole one",
    ),
    "one of two names": (half_tied, tensor_plan(2), "are one parameter, and are not to be cut alike"),
    "compiled as a whole": (lambda: torch.compile(small_gpt()), tensor_plan(2), "set [compile] blocks = true"),
}


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_on_every_rank_with_what_to_do(what: str) -> None:
    make, plan, reason = REFUSED[what]
    torch.manual_seed(0)
    with pytest.raises(WeftError) as caught:
        make_trainer(make(), plan, example=token_batch(2)[0])
    assert reason in str(caught.value)


@ranks(2)
def test_a_model_that_declares_nothing_needs_an_example() -> None:
    with pytest.raises(WeftError, match=r"give parallelize\(..., example=inputs\)"):
        make_trainer(Tower(lambda: Mixing("linear")), tensor_plan(2))


@ranks(2)
def test_an_optimizer_of_whole_tensors_is_refused() -> None:
    optimizer: Any = functools.partial(torch.optim.Adafactor, lr=1e-3)
    with pytest.raises(WeftError, match=r"Adafactor needs whole tensors, but with \[axes\] tensor = 2"):
        make_trainer(small_gpt(), tensor_plan(2), optimizer=optimizer)
