"""The blueprint of a GPT: where it may be cut between blocks, and how its layers split over tensor ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from discovered import run_split

from weft.blueprint import find_blueprint
from weft.models.gpt import GPT, GPTConfig
from weft.models.gpt_regions import gpt_regions
from weft.plan.partition.tensor import Count, Cut, Region, Section

SIZES = dict(vocab_size=37, context=16, num_layers=2, hidden=24, heads=6, mlp_hidden=20)


def make_gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES | changes)).double()
    for parameter in model.parameters():  # biases begin at zero, which would hide one that is added twice
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_declared_parts_are_those_that_would_be_found(positions: str, tied: bool) -> None:
    class Undeclared(GPT):
        weft_blueprint = None  # type: ignore[assignment]

    config = GPTConfig(**SIZES, positions=positions, tied=tied)
    declared = find_blueprint(GPT(config))
    assert replace(declared, regions=None, positions=None) == find_blueprint(Undeclared(config))
    assert declared.regions == gpt_regions(config)


def test_the_regions() -> None:
    config = GPTConfig(**SIZES | {"num_layers": 1}, kv_heads=2, bias=True)
    tokens, features = (Section(num_units=37),), (Section(num_units=20),)
    heads, kv_heads = Section(num_units=6, unit=4), Section(num_units=2, unit=4)
    attention, mlp = "blocks.0.attention", "blocks.0.mlp"
    assert gpt_regions(config) == (
        Region(rows=("embedding",), cuts=(Cut(name="embedding.weight", dim=0, sections=tokens),)),
        Region(
            columns=((f"{attention}.qkv",),),
            rows=(f"{attention}.out",),
            cuts=(
                Cut(name=f"{attention}.qkv.weight", dim=0, sections=(heads, kv_heads, kv_heads)),
                Cut(name=f"{attention}.qkv.bias", dim=0, sections=(heads, kv_heads, kv_heads)),
                Cut(name=f"{attention}.out.weight", dim=1, sections=(heads,)),
            ),
            counts=(
                Count(module=attention, attribute="heads", num_units=6),
                Count(module=attention, attribute="kv_heads", num_units=2),
            ),
        ),
        Region(
            columns=((f"{mlp}.up",),),
            rows=(f"{mlp}.down",),
            cuts=(
                Cut(name=f"{mlp}.up.weight", dim=0, sections=features),
                Cut(name=f"{mlp}.up.bias", dim=0, sections=features),
                Cut(name=f"{mlp}.down.weight", dim=1, sections=features),
            ),
        ),
        Region(columns=(("head",),), cuts=(Cut(name="embedding.weight", dim=0, sections=tokens),), is_output=True),
    )
    assert gpt_regions(replace(config, tied=False))[-1].cuts[0].name == "head.weight"


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 2, "tied": False},
        {"kv_heads": 1, "bias": True, "positions": "learned", "norm": "layer"},
    ],
)
def test_the_ranks_together_are_the_model(changes: dict[str, Any], tensor: int) -> None:
    model = make_gpt(**changes)
    regions = gpt_regions(model.config)
    assert run_split(model, regions, tensor, torch.randint(0, 37, (2, 7))) < 1e-9
