"""Hugging Face models whose tokens are shuffled give what they give in order: nothing but attention, which is told
where its tokens are, depends on where in memory a token is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from shuffled import GROUPED, NUM_TOKENS, ORDER, Wrapped, build, pass_of, shuffled_logits, switched_on, tokens_of
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, find_packed_sequence_indices

from weft.models.hugging_face_inputs import documents_of, inputs_of
from weft.parallel.sequence.hugging_face import NAME, use_registry
from weft.parallel.sequence.hugging_face_models import find_band
from weft.plan.partition.sequence import Band

pytestmark = pytest.mark.filterwarnings("ignore")

SAME = ("Llama", "Qwen3", "Mistral", "Phi3", "Gemma", "GPT2", "GPTNeoX", "OPT", "Bert", "Roberta")


def gradients(model: nn.Module, logits: Tensor, counted: Tensor | None = None) -> list[Tensor]:
    losses = F.log_softmax(logits, -1)[..., 3] * (1 if counted is None else counted)
    return [gradient for gradient in torch.autograd.grad(losses.sum(), list(model.parameters()), allow_unused=True)
            if gradient is not None]  # fmt: skip


def assert_as_whole(model: Any, **inputs: Any) -> None:
    counted = inputs.get("attention_mask")
    whole, ours = model(**inputs).logits, shuffled_logits(model, inputs)
    kept = torch.ones_like(whole[..., 0], dtype=torch.bool) if counted is None else counted.bool()
    torch.testing.assert_close(ours[kept], whole[kept], rtol=1e-5, atol=1e-5)  # some of their norms are float32
    for mine, theirs in zip(gradients(model, ours, counted), gradients(model, whole, counted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SAME)
def test_the_same_as_whole(kind: str) -> None:
    assert_as_whole(build(kind), input_ids=tokens_of())


WINDOWED = {"Mistral": 2, "Gemma2": 1, "Gemma3": 1, "Cohere2": 1}
"""Layers of 2 that have a window."""


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("is_padded", [False, True])
def test_windows(kind: str, is_padded: bool) -> None:
    """Each layer has its own, and soft caps (Gemma 2) are kept."""
    model = build(kind, sliding_window=4)
    inputs = {"input_ids": tokens_of()}
    if is_padded:
        inputs["attention_mask"] = torch.ones(2, NUM_TOKENS, dtype=torch.long)
        inputs["attention_mask"][1, -3:] = 0
    assert_as_whole(model, **inputs)
    with switched_on(model, pass_of()) as shuffled:
        model(tokens_of()[:, ORDER], position_ids=ORDER.unsqueeze(0), use_cache=False)
    assert shuffled.bands == [Band(before=3, after=0)] * WINDOWED[kind]


def test_windows_that_look_both_ways() -> None:
    """As ModernBERT has them."""
    for size in (1, 4):
        band = find_band(masking_utils.sliding_window_bidirectional_mask_function(size), size)
        assert band is not None
        q, k = torch.arange(9)[:, None], torch.arange(9)
        theirs = masking_utils.sliding_window_bidirectional_mask_function(size)(0, 0, q, k)
        assert torch.equal(theirs, (q - k <= band.before) & (q - k >= -band.after))


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Bert", "OPT", "Roberta"])
def test_padding(kind: str, is_left: bool) -> None:
    mask = torch.ones(2, NUM_TOKENS, dtype=torch.long)
    mask[1, slice(0, 3) if is_left else slice(-3, None)] = 0
    assert_as_whole(build(kind), input_ids=tokens_of() * mask, attention_mask=mask)


def test_a_mask_of_ones_is_none() -> None:
    read = inputs_of(build("Llama"), {"input_ids": tokens_of(), "attention_mask": torch.ones(2, NUM_TOKENS)})
    assert read is not None
    assert read.key_mask_BS is None and "attention_mask" not in read.inputs


@pytest.mark.parametrize("use_cache", [False, True, None])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2"])
def test_documents(kind: str, use_cache: bool | None) -> None:
    """With a cache, their default, transformers ignores documents; so do we."""
    model = build(kind)
    positions = torch.cat([torch.arange(5), torch.arange(4), torch.arange(3)]).expand(2, -1)
    inputs = {"input_ids": tokens_of(), "position_ids": positions, "use_cache": use_cache}
    read = inputs_of(model, inputs)
    assert read is not None
    assert (read.documents_BS is None) == (use_cache is not False)
    assert_as_whole(model, **inputs)


@pytest.mark.parametrize("inputs", [{}, {"attention_mask": torch.ones(2, NUM_TOKENS)}])
def test_positions_that_are_no_documents(inputs: dict[str, Tensor]) -> None:
    positions = torch.arange(6).repeat(2, 2)
    assert_as_whole(build("Bert"), input_ids=tokens_of(), position_ids=positions, **inputs)
    assert_as_whole(build("OPT"), input_ids=tokens_of(), position_ids=positions, **inputs)


def test_documents_follow_their_rule() -> None:
    for rows in ([[0, 1, 2, 3]], [[0, 1, 0, 1], [5, 6, 7, 8]], [[0, 0, 1, 2]], [[3, 4, 6, 7]], [[0]]):
        ours, theirs = documents_of(torch.tensor(rows)), find_packed_sequence_indices(torch.tensor(rows))
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("inputs", [tokens_of(), (tokens_of(), None), {"input_ids": tokens_of()}])
def test_inputs_in_any_form(inputs: Any) -> None:
    read = inputs_of(build("Llama"), inputs)
    assert read is not None
    assert set(read.along) == {"input_ids", "position_ids"}
    assert read.inputs["use_cache"] is False
    assert torch.equal(read.inputs["position_ids"], torch.arange(NUM_TOKENS).unsqueeze(0))


def test_embeddings_instead_of_tokens() -> None:
    assert_as_whole(build("Llama"), inputs_embeds=torch.randn(2, NUM_TOKENS, 24, dtype=torch.float64))


def test_recomputed_by_the_model() -> None:
    model = build("Llama", use_cache=False)
    whole = gradients(model, model(tokens_of()).logits)
    model.gradient_checkpointing_enable()
    read = inputs_of(model, tokens_of()[:, ORDER])
    assert read is not None
    with switched_on(model, pass_of()) as shuffled:
        logits = model(**read.inputs | {"position_ids": ORDER.unsqueeze(0)}).logits
        ours = gradients(model, logits)
    assert shuffled.num_calls == 4
    for mine, theirs in zip(ours, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_nothing_is_left_behind() -> None:
    model = build("Llama").eval()
    inner = model.model.layers[1].self_attn
    inner.config = transformers.LlamaConfig(**GROUPED, attn_implementation="eager")
    tokens = tokens_of()[:, :4]
    before = model(tokens).logits
    made = model.generate(tokens, max_new_tokens=4, do_sample=False)
    with switched_on(model, pass_of()):
        assert model.config._attn_implementation == inner.config._attn_implementation == NAME
        assert NAME in ALL_MASK_ATTENTION_FUNCTIONS
    assert (model.config._attn_implementation, inner.config._attn_implementation) == ("sdpa", "eager")
    assert NAME not in ALL_MASK_ATTENTION_FUNCTIONS and NAME not in transformers.AttentionInterface()
    assert transformers.masking_utils.find_packed_sequence_indices is find_packed_sequence_indices
    assert not model._forward_pre_hooks
    assert torch.equal(model(tokens).logits, before)
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), made)


def test_a_wrapped_model_is_told_its_positions() -> None:
    model = Wrapped(build("Llama"))
    assert inputs_of(model, tokens_of()) is None
    with switched_on(model, pass_of()):
        ours = model(tokens_of()[:, ORDER])
    torch.testing.assert_close(ours[:, ORDER.argsort()], model(tokens_of()), rtol=1e-5, atol=1e-5)


def test_a_derived_class_without_source() -> None:
    model = build("Llama")
    model.__class__ = type("Derived", (type(model),), {"__module__": "nowhere"})
    assert_as_whole(model, input_ids=tokens_of())


def test_other_models_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError

    assert use_registry(nn.Linear(2, 2), attend, now=pass_of, numbers=lambda where: ORDER.to(where)) is None
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    assert inputs_of(nn.Linear(2, 2), tokens_of()) is None
