"""Hugging Face models split by the plan that comes with them, built from configurations: nothing is fetched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from discovered import run_split
from torch import Tensor, nn

from weft.errors import ModelError
from weft.parallel.tensor.hugging_face_plan import hugging_face_regions
from weft.plan.partition.tensor import Count, Cut, Region, Section, region_problems

SIZES = dict(
    vocab_size=50, hidden_size=48, intermediate_size=36, num_hidden_layers=2, num_attention_heads=12,
    num_key_value_heads=6, head_dim=4, max_position_embeddings=64, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
TOLERANCE = 1e-4  # of gradients up to 100: their norms and rotary tables work in float32 whatever they are given


def build(kind: str, **changes: Any) -> Any:
    """A small model of random float64 weights that answers with its logits only."""
    torch.manual_seed(0)
    causal = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")

    class Logits(causal):  # type: ignore[misc, valid-type]
        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = super().forward(tokens, use_cache=False).logits
            return logits

    model = Logits(getattr(transformers, f"{kind}Config")(**SIZES | changes)).double()
    for parameter in model.parameters():  # norms and biases begin alike everywhere, which would hide a wrong cut
        nn.init.normal_(parameter, std=0.2)
    return model


def regions_of(model: nn.Module) -> tuple[Region, ...]:
    regions = hugging_face_regions(model)
    assert regions is not None
    return regions


def cut_names(model: nn.Module) -> set[str]:
    return {cut.name for region in regions_of(model) for cut in region.cuts}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Llama", {"num_key_value_heads": 1, "attn_implementation": "eager"}),
        ("Qwen2", {"num_key_value_heads": 12}),
        ("Qwen3", {"num_key_value_heads": 2}),
        ("Mistral", {"sliding_window": 4}),
        ("Gemma", {}),
        ("Phi3", {"num_key_value_heads": 2}),
        ("Phi", {"qk_layernorm": True, "partial_rotary_factor": 1.0}),
        ("GPTNeoX", {"tie_word_embeddings": True}),
        ("Cohere", {"use_qk_norm": True}),
        ("GraniteSWA", {"sliding_window": 4, "attn_implementation": "eager"}),
        ("Apertus", {}),
        ("Olmo2", {}),
    ],
)
def test_the_ranks_together_are_the_model(kind: str, changes: dict[str, Any], tensor: int) -> None:
    model = build(kind, **changes)
    assert run_split(model, regions_of(model), tensor, torch.randint(0, 50, (2, 9))) < TOLERANCE


def test_the_regions_of_a_llama() -> None:
    regions = regions_of(build("Llama", num_hidden_layers=1, attention_bias=True))
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    tokens, features = (Section(num_units=50),), (Section(num_units=36),)
    heads, kv_heads = (Section(num_units=12, unit=4),), (Section(num_units=6, unit=4),)
    assert regions == (
        Region(rows=("model.embed_tokens",), cuts=(Cut(name="model.embed_tokens.weight", dim=0, sections=tokens),)),
        Region(
            columns=((f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),),
            rows=(f"{attention}.o_proj",),
            cuts=(
                Cut(name=f"{attention}.q_proj.weight", dim=0, sections=heads),
                Cut(name=f"{attention}.q_proj.bias", dim=0, sections=heads),
                Cut(name=f"{attention}.k_proj.weight", dim=0, sections=kv_heads),
                Cut(name=f"{attention}.k_proj.bias", dim=0, sections=kv_heads),
                Cut(name=f"{attention}.v_proj.weight", dim=0, sections=kv_heads),
                Cut(name=f"{attention}.v_proj.bias", dim=0, sections=kv_heads),
                Cut(name=f"{attention}.o_proj.weight", dim=1, sections=heads),
            ),
            counts=(Count(module=attention, attribute="num_key_value_groups", num_units=12, per_units=6),),
        ),
        Region(
            columns=((f"{mlp}.gate_proj", f"{mlp}.up_proj"),),
            rows=(f"{mlp}.down_proj",),
            cuts=(
                Cut(name=f"{mlp}.gate_proj.weight", dim=0, sections=features),
                Cut(name=f"{mlp}.up_proj.weight", dim=0, sections=features),
                Cut(name=f"{mlp}.down_proj.weight", dim=1, sections=features),
            ),
        ),
        Region(columns=(("lm_head",),), cuts=(Cut(name="lm_head.weight", dim=0, sections=tokens),), is_output=True),
    )
    assert not any(region_problems(region, 12) for region in regions)


def test_fused_layers_are_cut_in_sections() -> None:
    _, attention, mlp, *_ = regions_of(build("Phi3", num_key_value_heads=2))
    assert attention.cuts[0].sections == tuple(Section(num_units=number, unit=4) for number in (12, 2, 2))
    assert mlp.cuts[0].sections == (Section(num_units=36),) * 2
    assert (
        Count(module="model.layers.0.self_attn", attribute="config.num_attention_heads", num_units=12)
        in attention.counts
    )
    _, attention, *_ = regions_of(build("GPTNeoX", tie_word_embeddings=True))
    assert attention.cuts[0].sections == (Section(num_units=12, unit=12),), "query, key and value of a head in turn"


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("Qwen3", {}, ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]),
        # Neither of these is in the plan.
        ("Phi", {"qk_layernorm": True}, [f"self_attn.{x}_layernorm.{y}" for x in "qk" for y in ("weight", "bias")]),
        ("Apertus", {}, ["mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"]),
    ],
)
def test_what_is_whole_but_used_on_shares(kind: str, changes: dict[str, Any], expected: list[str]) -> None:
    partial = [name for region in regions_of(build(kind, **changes)) for name in region.partial]
    assert set(f"model.layers.0.{name}" for name in expected) <= set(partial)
    assert len(partial) == len(set(partial))


def test_what_is_of_heads_is_cut_by_heads() -> None:
    assert "model.layers.1.self_attn.sinks" in cut_names(build("GraniteSWA"))
    assert "model.layers.1.self_attn.k_norm.weight" in cut_names(build("Cohere", use_qk_norm=True))


def test_tied_weights_are_cut_once_and_together() -> None:
    first, *_, last = regions_of(build("Llama", tie_word_embeddings=True))
    assert (first.cuts, last.columns) == (last.cuts, (("lm_head",),))
    first, *_, last = regions_of(build("GPTNeoX", tie_word_embeddings=True))  # whose plan forgets the embedding
    assert (first.rows, first.cuts) == (("gpt_neox.embed_in",), last.cuts)
    model = build("Llama", tie_word_embeddings=True)
    model.model.embed_tokens.max_norm = 1.0
    assert not any("embed" in name or "head" in name for name in cut_names(model))


def test_what_is_gathered_stays_whole() -> None:
    """The norms of OLMo 2 are over all heads together."""
    assert not any("self_attn" in name for name in cut_names(build("Olmo2")))


def test_a_model_without_a_head() -> None:
    config = transformers.LlamaConfig(**SIZES)
    first, *inside = regions_of(transformers.LlamaModel(config))
    assert first.rows == ("embed_tokens",) and len(inside) == 4 and not any(region.is_output for region in inside)


@pytest.mark.parametrize("what", ["no plan", "no model of theirs", "replaced", "wrapped"])
def test_what_is_left_to_the_flow_of_data(what: str) -> None:
    class Adapted(nn.Linear):
        pass

    if what == "no model of theirs":
        model: nn.Module = nn.Linear(3, 3)
    elif what == "no plan":
        model = build("GPT2")
    else:
        model = build("Llama")
    if what == "replaced":
        model.get_submodule("model.layers.1.mlp").up_proj = Adapted(48, 36, bias=False)
    assert hugging_face_regions(nn.Sequential(model) if what == "wrapped" else model) is None


def test_what_is_not_understood_is_refused_all_at_once() -> None:
    model = build("Llama")
    model._tp_plan["model.layers.*.mlp.gate_proj"] = "packed_colwise"
    del model._tp_plan["model.layers.*.self_attn.o_proj"]
    with pytest.raises(ModelError) as caught:
        hugging_face_regions(model)
    alone, unknown = caught.value.problems
    assert '"model.layers.*.self_attn.v_proj": "colwise"' in alone and "3 column and 0 row layers" in alone
    assert '"model.layers.*.mlp.gate_proj": "packed_colwise"' in unknown and "weft_blueprint()" in unknown


def test_experts_are_refused() -> None:
    with pytest.raises(ModelError, match=r'"model.layers.\*.mlp.experts": "moe_tp_experts"'):
        hugging_face_regions(build("Mixtral", num_local_experts=2))


def test_a_parameter_of_unknown_use_is_refused() -> None:
    model = build("Llama")
    model.model.layers[1].mlp.slopes = nn.Parameter(torch.ones(36))
    with pytest.raises(ModelError, match=r'"model.layers.\*.mlp.slopes", of shape \(36,\)'):
        hugging_face_regions(model)


def test_sizes_that_do_not_fit_are_refused() -> None:
    model = build("Llama")
    model.model.layers[0].self_attn.q_proj = nn.Linear(48, 49, bias=False)
    model.model.layers[0].mlp.up_proj = nn.Linear(48, 35, bias=False)
    with pytest.raises(ModelError) as caught:
        hugging_face_regions(model)
    attention, mlp = caught.value.problems
    assert "49 features and not 48" in attention and "35 features and not 36" in mlp
