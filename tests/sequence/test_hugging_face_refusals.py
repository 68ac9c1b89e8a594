"""Refusals of arguments and settings of Hugging Face models that attention over several ranks does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from shuffled import ORDER, Shuffled, Wrapped, build, pass_of, shuffled_logits, switched_on, tokens_of
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

from weft.errors import ModelError
from weft.parallel.sequence.hugging_face import NAME, use_registry

pytestmark = pytest.mark.filterwarnings("ignore")

RESTARTING = torch.arange(6).repeat(2, 2)
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Llama", {"attention_dropout": 0.1}, {}, "gives attention dropout = 0.1; set the model's attention dropout to 0"),
    ("Mistral", {"sliding_window": 0}, {}, "gives attention a window of 0, through which a query sees no key"),
    ("GptOss", {}, {}, "gives attention s_aux = a tensor of (4,)"),
    ("Llama", {}, {"cu_seq_lens_q": torch.tensor([0, 12])}, "gives attention cu_seq_lens_q = a tensor of (2,)"),
    ("Llama", {}, {"attention_mask": torch.ones(2, 1, 12, 12)}, "attention_mask of (2, 1, 12, 12), where the"),
    ("Llama", {}, {"attention_mask": torch.ones(2, 11)}, "attention_mask of (2, 11), where the sequences are 2 of 12"),
    ("Llama", {}, {"position_ids": torch.zeros(3, 2, 12)}, "position_ids of (3, 2, 12)"),
    ("Llama", {}, {"past_key_values": transformers.DynamicCache()}, "past_key_values: no rank has the keys of earlier"),
    ("Llama", {}, {"output_attentions": True}, "output_attentions: no rank has the weights of attention"),
    ("Llama", {}, {"head_mask": torch.ones(2, 4), "output_attentions": True}, "- LlamaForCausalLM was given head_mask"),
    (
        "Llama",
        {"attn_implementation": "eager", "output_attentions": True},
        {},
        "output_attentions in the configuration",
    ),
    (
        "Llama",
        {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
        "angles change with the length of the sequence beyond 8 tokens; it has 12",
    ),
    ("OPT", {"use_cache": False}, {"position_ids": RESTARTING}, "masks no documents, although its position_ids begin"),
    ("GPTJ", {}, {}, 'GPTJForCausalLM attends in code of its own (attn_implementation = "eager")'),
]


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("kind", "changes", "inputs", "reason"), REFUSED)
def test_refused(kind: str, changes: dict[str, Any], inputs: dict[str, Any], reason: str) -> None:
    model = build(kind, **changes)
    assert reason in refusal(lambda: shuffled_logits(model, {"input_ids": tokens_of(), **inputs}))


def test_two_sequences_are_refused() -> None:
    model, attend = build("T5"), Shuffled(pass_of()).attend
    reason = refusal(lambda: use_registry(model, attend, now=pass_of, numbers=ORDER.to))
    assert "T5ForConditionalGeneration is an encoder and a decoder" in reason


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("Llama", {"attention_mask": torch.ones(2, 12).tril(10)}, "an attention_mask of (2, 12) that reaches it"),
        ("Llama", {"attention_mask": torch.ones(2, 1, 12, 12)}, "gives attention a mask of (2, 1, 12, 12)"),
        ("Llama", {"position_ids": RESTARTING}, "not the global positions of this rank's tokens"),
        ("Roberta", {}, "makes its positions from the whole sequence"),
    ],
)
def test_refused_when_wrapped(kind: str, given: dict[str, Any], reason: str) -> None:
    model = Wrapped(build(kind), **given)
    with switched_on(model, pass_of()):
        assert reason in refusal(lambda: model(tokens_of()))


@pytest.mark.parametrize(("kind", "changes"), [("Bloom", {}), ("Mpt", {}), ("Falcon", {"alibi": True})])
def test_alibi_is_refused_by_its_name(kind: str, changes: dict[str, Any]) -> None:
    model, attend = build(kind, **changes), Shuffled(pass_of()).attend
    with pytest.raises(ModelError) as caught:
        use_registry(model, attend, now=pass_of, numbers=ORDER.to)
    (problem,) = caught.value.problems  # one for the model, none for its parts
    assert f"{kind}ForCausalLM adds ALiBi to its attention scores in code of its own" in problem


def test_a_model_that_calls_torch_itself_is_not_switched() -> None:
    """`F.scaled_dot_product_attention` stays as it is; but it is given no mask of the local tokens, also if the model
    asks for one, and the detection of documents must not see local positions."""
    model = build("Falcon", alibi=False)
    with switched_on(model, pass_of()) as shuffled:
        asked = create_causal_mask(model.config, torch.zeros(2, 12, 24), None, None, allow_is_causal_skip=False)
        assert asked is None
        ours = model(tokens_of(), position_ids=ORDER.unsqueeze(0), use_cache=False).logits
    causal = model(tokens_of(), position_ids=ORDER.unsqueeze(0), use_cache=True).logits
    assert shuffled.num_calls == 0 and torch.equal(ours, causal)


def test_other_masks_are_refused() -> None:
    """Such as those of models in which the tokens of an image see each other."""
    model = build("Llama")
    embedded = torch.zeros(2, 12, 24)
    with switched_on(model, pass_of()):
        for also in ({"or_mask_function": lambda *places: True}, {"block_sequence_ids": torch.zeros(2, 12)}):
            reason = refusal(lambda also=also: create_causal_mask(model.config, embedded, None, None, **also))
            assert "by more than causality, padding and documents" in reason


def test_chunks_are_refused() -> None:
    """As Llama 4 has them: they are no window, though they have a size."""
    model = build("Llama")
    model.config.attention_chunk_size = 4
    with switched_on(model, pass_of()):
        reason = refusal(lambda: create_chunked_causal_mask(model.config, torch.zeros(2, 12, 24), None, None))
    assert "masks all but 4 tokens in a way of its own (chunks), less than the sequence's 12" in reason


def test_windows_without_masks_are_refused() -> None:
    query = torch.zeros(1, 4, 12, 6)
    with switched_on(build("Llama"), pass_of()):
        attention = transformers.AttentionInterface()[NAME]
        reason = refusal(lambda: attention(torch.nn.Identity(), query, query, query, None, sliding_window=11))
        assert "sliding_window = 11, less than the sequence's 12 tokens, but no mask of that window" in reason
        attention(torch.nn.Identity(), query, query, query, None, sliding_window=12)
