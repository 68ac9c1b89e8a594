"""Regions found for models that declare none.

Every split is run: outputs, gradients of all weights, and buffers must be the whole model's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import unseen
from discovered import run_split
from torch import Tensor, nn
from unseen import B, C, FusedAttention, GatedMLP, H, Language, PlainMLP, Residual, T, V

from weft.errors import ModelError
from weft.models.convnet import ConvNet, ConvNetConfig
from weft.models.gpt import GPT, GPTConfig
from weft.parallel.tensor.discovery.find import find
from weft.plan.partition.tensor import Region


def tokens() -> Tensor:
    return torch.randint(0, V, (B, T))


def activations() -> Tensor:
    return torch.randn(B, T, C, dtype=torch.float64)


def images(size: int, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, channels, size, size, dtype=torch.float64)


def ready(model: nn.Module) -> nn.Module:
    """The model in float64, with random parameters: equal entries would hide a wrong cut."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def split(model: nn.Module, inputs: Tensor, tensor: int) -> tuple[Region, ...]:
    """The regions of a model, after checking them."""
    regions = find(ready(model), lambda meta_copy: meta_copy(inputs), tensor=tensor).regions
    assert run_split(model, regions, tensor, inputs) < 1e-10
    return regions


def roles(regions: tuple[Region, ...]) -> list[str]:
    """Columns and rows of each region."""
    return [f"{' + '.join(' '.join(group) for group in r.columns)} > {' '.join(r.rows)}" for r in regions]


def units(region: Region) -> dict[str, list[tuple[int, int]]]:
    return {cut.name: [(section.num_units, section.unit) for section in cut.sections] for cut in region.cuts}


ATTENTION = "blocks.0.attn.q_proj blocks.0.attn.k_proj blocks.0.attn.v_proj > blocks.0.attn.o_proj"
MLP = "blocks.0.mlp.c_fc > blocks.0.mlp.c_proj"
ENDS = (" > tokens", "head > ")


@pytest.mark.parametrize("tensor", [2, 3, 4])
def test_a_transformer_gets_megatrons_splits(tensor: int) -> None:
    model = Language(Residual(unseen.NanoAttention(), PlainMLP()))
    regions = split(model, tokens(), tensor)
    assert roles(regions) == [ENDS[0], "blocks.0.attn.c_attn > blocks.0.attn.c_proj", MLP, ENDS[1]]
    attention, mlp, head = regions[1:]
    assert units(attention) == {
        "blocks.0.attn.c_attn.weight": [(H, C // H)] * 3,
        "blocks.0.attn.c_attn.bias": [(H, C // H)] * 3,
        "blocks.0.attn.c_proj.weight": [(H, C // H)],
    }
    assert units(mlp)["blocks.0.mlp.c_proj.weight"] == [(4 * C, 1)]
    assert head.is_output and not attention.is_output
    assert [resized.module for resized in attention.resized] == ["blocks.0.attn"] and not mlp.resized


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("key_heads", [1, 2, 3])
@pytest.mark.parametrize("how", ["repeat_kv", "interleave", "gqa"])
def test_grouped_heads_are_split_together_or_repeated(how: str, key_heads: int, tensor: int) -> None:
    model = Language(Residual(unseen.LlamaAttention(key_heads, how), GatedMLP(fused=True)), tied=True)
    embedding, head, attention, mlp = split(model, tokens(), tensor)
    assert roles((embedding, head, attention)) == [*ENDS, ATTENTION]
    assert embedding.cuts == head.cuts and embedding.cuts[0].name == "tokens.weight"
    assert attention.partial == ("blocks.0.attn.k_norm.weight", "blocks.0.attn.q_norm.weight")
    keys = dict(units(attention))["blocks.0.attn.k_proj.weight"]
    assert keys == [(key_heads, C // H)]
    assert units(mlp)["blocks.0.mlp.gate_up.weight"] == [(32, 1)] * 2


@pytest.mark.parametrize(
    ("order", "sections"),
    [("3HD", [(H, 4)] * 3), ("3HD indexed", [(H, 4)] * 3), ("H3D", [(H, 12)]), ("sliced", [(H, 4)] * 3)],
)
def test_fused_projections_are_cut_by_heads_in_any_order(order: str, sections: list[tuple[int, int]]) -> None:
    model = Residual(FusedAttention(order), GatedMLP(fused=False))
    attention, mlp = split(model, activations(), 3)
    assert units(attention)["attn.qkv.weight"] == sections
    assert mlp.columns == (("mlp.gate", "mlp.up"),)


def test_query_heads_in_a_dim_of_their_own() -> None:
    for tensor, heads in ((3, [(3, 8)]), (6, [(6, 4)])):
        (region,) = split(unseen.GroupedEinsum(), activations(), tensor)
        assert units(region)["q.weight"] == heads and units(region)["kv.weight"] == [(3, 4)] * 2


def test_heads_reach_into_parameters_and_buffers() -> None:
    attention, _ = split(Residual(unseen.BiasedAttention(), PlainMLP()), activations(), 2)
    cuts = {cut.name: cut.dim for cut in attention.cuts}
    assert cuts["attn.scale"] == cuts["attn.table"] == cuts["attn.slopes"] == 0
    assert not attention.partial


def test_a_narrow_path_beside_a_layer_is_split_with_it() -> None:
    regions = split(Residual(unseen.LoRAAttention(), PlainMLP()), activations(), 2)
    assert roles(regions)[0] == "attn.q_proj.base attn.k_proj attn.v_proj + attn.q_proj.b > attn.o_proj"


def test_attention_and_mlp_of_one_projection() -> None:
    (region,) = split(unseen.PalmBlock(), activations(), 3)
    assert units(region)["fused.weight"] == [(H, 4), (1, 4), (1, 4), (24, 1), (24, 1)]
    assert region.rows == ("out", "down")


def test_a_vision_transformer_and_torchs_own_layer() -> None:
    inputs = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert len(split(unseen.Vision(), inputs, 2)) == 4
    encoder = nn.TransformerEncoderLayer(C, H, 48, dropout=0.0, batch_first=True)
    assert roles(split(encoder, activations(), 2)) == ["linear1 > linear2"]


def test_a_chain_of_layers_alternates() -> None:
    layers = [nn.Linear(C, 48), nn.ReLU(), nn.Linear(48, C), nn.Tanh(), nn.Linear(C, 48), nn.ReLU(), nn.Linear(48, C)]
    assert roles(split(nn.Sequential(*layers), activations(), 2)) == ["0 > 2", "4 > 6"]
    same = nn.Sequential(*(nn.Linear(C, C) for _ in range(5)))
    assert roles(split(same, activations(), 2)) == ["0 > 1", "2 > 3", "4 > "]


def test_a_layer_that_is_called_again_and_again() -> None:
    block = Residual(FusedAttention("3HD"), PlainMLP())
    assert len(split(nn.Sequential(block, block), activations(), 2)) == 2


@pytest.mark.parametrize("batch_norm", [True, False])
def test_convolutions_are_split_by_channels_inside_each_block(batch_norm: bool) -> None:
    model = ConvNet(ConvNetConfig(width=8, num_blocks=2, batch_norm=batch_norm))
    regions = split(model, images(8, channels=1)(), 2)
    assert roles(regions) == [f"blocks.{k}.conv1 > blocks.{k}.conv2" for k in range(2)]
    counted = {(count.module, count.attribute) for count in regions[0].counts}
    assert ("blocks.0.norm1", "num_features" if batch_norm else "num_groups") in counted


def test_convolutions_by_groups_are_towers() -> None:
    tall, small = split(unseen.AlexNet(), images(8)(), 2)
    assert roles((tall, small)) == ["features.6 > classifier.0", "classifier.2 > classifier.4"]
    assert units(tall)["features.8.weight"] == [(2, 12)] and units(tall)["classifier.0.weight"] == [(2, 32)]
    (region,) = split(unseen.Separable(), images(4)(), 4)
    assert roles((region,)) == ["wide > narrow"]
    assert {"own.weight", "norm.running_var", "slope.weight", "groups.bias"} <= set(units(region))


def test_our_gpt_without_its_declaration() -> None:
    model = GPT(GPTConfig(vocab_size=50, context=8, num_layers=1, hidden=24, heads=6, kv_heads=2, bias=True))
    regions = split(model, tokens(), 2)
    assert roles(regions)[2] == "blocks.0.attention.qkv > blocks.0.attention.out"
    assert units(regions[2])["blocks.0.attention.qkv.weight"] == [(2, 12), (2, 4), (2, 4)]


def test_what_leaves_a_stage_is_whole() -> None:
    layers = nn.Sequential(nn.Linear(C, 48), nn.ReLU(), nn.Linear(48, C))
    x = torch.randn(2, C)
    assert find(layers, lambda meta_copy: meta_copy(x), tensor=2, whole_between=("1",)).regions == ()
    assert len(find(layers, lambda meta_copy: meta_copy(x), tensor=2).regions) == 1


def test_a_vocabulary_is_split_where_it_pays_and_all_its_names_agree() -> None:
    def regions(model: nn.Module) -> list[str]:
        return roles(find(model, lambda meta_copy: meta_copy(tokens()), tensor=2).regions)

    model = Language(Residual(FusedAttention("3HD"), PlainMLP()), tied=True)
    assert [line for line in regions(model) if line in ENDS] == list(ENDS)
    model.norm = nn.Identity()
    model.head = nn.Linear(C, V)
    model.head.weight = model.tokens.weight
    model.head.register_forward_hook(lambda module, args, output: output.softmax(-1))
    assert not [line for line in regions(model) if line in ENDS]
    narrow = Language(tied=False)
    narrow.tokens, narrow.head = nn.Embedding(8, C), nn.Linear(C, 8)
    assert find(narrow, lambda meta_copy: meta_copy(tokens() % 8), tensor=2).regions == ()


@pytest.mark.parametrize(
    ("work", "is_split"),
    [
        (lambda model, logits: logits.float() * 2.0, True),
        (lambda model, logits: logits.softmax(-1), False),
        (lambda model, logits: logits[..., : V // 2], False),
        (lambda model, logits: logits + model.prior, False),
        (lambda model, logits: logits * model.scale, False),
        (lambda model, logits: logits.reshape(B, T, V).clone(), False),
        (lambda model, logits: (logits, logits.mean()), False),
        (lambda model, logits: (logits, model.scale), False),
    ],
)
def test_an_output_stays_a_share_if_it_is_returned_as_it_was_made(
    work: Callable[[nn.Module, Tensor], object], is_split: bool
) -> None:
    model = Language()
    model.prior, model.scale = nn.Parameter(torch.randn(V)), nn.Parameter(torch.randn(1))
    regions = find(model, lambda meta_copy: work(meta_copy, meta_copy(tokens())), tensor=2).regions
    assert any(region.is_output for region in regions) == is_split


def test_nothing_of_the_model_or_of_random_numbers_is_changed() -> None:
    model = Language(Residual(unseen.LoRAAttention(), PlainMLP()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = model.head.out_features, type(model.head.out_features), "forward" in vars(model.head)
    state = torch.get_rng_state()
    find(model, lambda meta_copy: meta_copy(state[: B * T].view(B, T).long() % V) + torch.rand(()), tensor=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert attributes == (V, int, False)


def test_what_cannot_be_followed_says_where() -> None:
    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return x if self.layer(x).sum().item() > 0 else -x

    model = nn.Sequential(nn.Linear(C, C), Curious())
    with pytest.raises(ModelError, match=r'"1" cannot be followed without values .* declare its `regions`'):
        find(model, lambda meta_copy: meta_copy(torch.randn(2, C)), tensor=2)


def test_layers_that_stay_whole_have_a_reason() -> None:
    model = unseen.Vision()
    found = find(model, lambda meta_copy: meta_copy(torch.randn(2, 3, 8, 8)), tensor=8)
    assert [f"{name}: {reason}" for name, reason in found.reasons.items()] == [
        'patch: its 24 features: layer_norm in "blocks.0.norm1" needs all of them',
        "blocks.0.attn.qkv: the 6 of its 3 · 6 · 4 features: 6 are too few for 8 ranks",
        'blocks.0.attn.proj: its 24 features: layer_norm in "blocks.0.norm1" needs all of them',
        "blocks.1.attn.qkv: the 6 of its 3 · 6 · 4 features: 6 are too few for 8 ranks",
        'blocks.1.attn.proj: its 24 features: layer_norm in "blocks.0.norm1" needs all of them',
        "head: its 10 features: they are returned by the model, and 10 features are too few to be worth it",
    ]
