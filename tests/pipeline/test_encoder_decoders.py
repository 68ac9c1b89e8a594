"""Encoder-decoders under a pipeline: where one cannot be cut, the refusal says that it is one, and where that lies."""

from __future__ import annotations

import pytest
import torch
from oracle import SGD
from ranks import ranks

import weft
from weft.errors import ModelError
from weft.plan.plan import Axes, Plan


@ranks(2)
def test_a_decoder_that_asks_for_values_is_named_with_its_place() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, **sizes
    )
    model = transformers.BartForConditionalGeneration(config)
    tokens = torch.arange(3, 35).view(4, 8)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :6]}
    with pytest.raises(ModelError) as caught:
        weft.parallelize(
            model, Plan(axes=Axes(pipeline=2)), loss="cross-entropy", optimizer=SGD, example=inputs, device="cpu"
        )
    asks, cause = caught.value.problems
    assert '"model.decoder" cannot be followed without values' in asks and ", at transformers/masking_utils.py:" in asks
    assert cause.startswith(
        "BartForConditionalGeneration is an encoder and a decoder: a pipeline cuts the layers of one (model.encoder."
    )
    assert cause.endswith("set [axes] pipeline = 1")
