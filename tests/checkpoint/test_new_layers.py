"""A pretrained body with a new head, and the tokenizer that comes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import data_plan, make_trainer, pipeline_plan, small_gpt, tensor_plan
from ranks import ranks
from safetensors.torch import load_file, save_file
from torch import nn

from weft.checkpoint import pretrained
from weft.checkpoint.new_layers import layers_without_weights
from weft.errors import CheckpointError, ModelError
from weft.plan.plan import Plan
from weft.training.run.components import prepare
from weft.training.run.job import parse_job
from weft.training.trainer import Trainer

transformers = pytest.importorskip("transformers")

PLANS = {
    "data 2": data_plan(2),
    "zero 1": data_plan(2, shard="optimizer"),
    "zero 3": data_plan(2, shard="parameters"),
    "tensor 2": tensor_plan(2),
    "pipeline 2": pipeline_plan(2, microbatches=2, cuts=(1,)),
}
TOKENS = torch.arange(16).view(2, 8)


def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        num_labels=3,
    )


def write_body(folder: Path) -> None:
    """A causal language model, with a tokenizer, and a configuration of how to generate that is not the default."""
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config())
    model.generation_config.max_length = 77
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "one": 1, "two": 2}, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(folder)


def on_first(action: Any) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def classifier(folder: Path, plan: Plan, *, device: str = "meta", **changes: Any) -> Trainer:
    torch.manual_seed(5)
    with torch.device(device):
        model = transformers.LlamaForSequenceClassification(config())
    return make_trainer(model, plan, weights=folder, example=TOKENS, **changes)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in sorted(folder.glob("model-*")) for name, one in load_file(path).items()}


@ranks(2)
def test_a_new_head_is_drawn_alike_under_every_plan(tmp_path: Path) -> None:
    on_first(lambda: write_body(tmp_path / "body"))
    body = load_file(tmp_path / "body" / "model.safetensors")
    heads = []
    for name, plan in PLANS.items():
        with mock.patch.object(pretrained.log, "warning") as said:
            trainer = classifier(tmp_path / "body", plan, new_layers=["score"])
        told = [call.args[0] % call.args[1:] for call in said.call_args_list]
        assert len(told) == 2 * (dist.get_rank() == 0)
        if told:
            assert told[0].endswith("holds 1 tensors that this model does not have: lm_head.weight")
            assert told[1].endswith("1 tensors are new, not read: score.weight")
        trainer.save(tmp_path / name)
        saved = tensors_in(tmp_path / name)
        heads.append(saved.pop("score.weight"))
        assert all(torch.equal(tensor, body[name]) for name, tensor in saved.items())
    assert heads[0].shape == (3, 16) and heads[0].std() > 0.01
    assert all(torch.equal(head, heads[0]) for head in heads)


@ranks(2)
def test_with_memory_it_keeps_the_models_own_values(tmp_path: Path) -> None:
    on_first(lambda: write_body(tmp_path / "body"))
    torch.manual_seed(5)
    own = transformers.LlamaForSequenceClassification(config()).score.weight.detach().clone()
    for name in ("data 2", "zero 3"):
        trainer = classifier(tmp_path / "body", PLANS[name], device="cpu", new_layers=["score"])
        trainer.save(tmp_path / name)
        assert torch.equal(tensors_in(tmp_path / name)["score.weight"], own)


@ranks(2)
def test_what_is_missing_is_refused_with_the_layers_that_may_be_meant(tmp_path: Path) -> None:
    on_first(lambda: write_body(tmp_path / "body"))
    with pytest.raises(CheckpointError) as caught:
        classifier(tmp_path / "body", PLANS["pipeline 2"])
    assert '"score.weight" is in no file' in str(caught.value)
    assert "if \"score\" is new, say so: new_layers = ['score']" in str(caught.value)
    foreign = {"something": torch.ones(2)}
    on_first(lambda: (tmp_path / "foreign").mkdir())
    on_first(lambda: save_file(foreign, tmp_path / "foreign" / "model.safetensors"))
    for new in ([], ["score"], ["model", "score"]):
        with pytest.raises(CheckpointError, match="does not hold the weights of this model") as caught:
            classifier(tmp_path / "foreign", PLANS["data 2"], new_layers=new)
        assert "say so" not in str(caught.value), "nothing matches: these are other weights, not a new layer"


def test_names_that_no_layer_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r'the model has no layer "scores"; did you mean "score"\?'):
        classifier(tmp_path, Plan(), new_layers=["scores"])
    with pytest.raises(ModelError, match="has no effect without weights"):
        make_trainer(small_gpt(), Plan(), new_layers=["head"])


def test_layers_that_may_be_meant() -> None:
    body = [f"body.{number}.weight" for number in range(4)]
    assert layers_without_weights(["score.weight", "score.bias"], body) == ["score"]
    assert layers_without_weights(["body.4.weight", "scale"], body) == ["body.4", "scale"]
    assert layers_without_weights(["body.0.bias"], body) == ["body.0.bias"], "a part of a layer is no new layer"
    assert layers_without_weights([f"tail.{number}" for number in range(9)], body) == []


@ranks(2)
def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    """From the weights' folder into checkpoints and exports, and through a resume from a checkpoint alone."""
    on_first(lambda: write_body(tmp_path / "body"))
    trainer = classifier(tmp_path / "body", PLANS["zero 3"], new_layers=["score"])
    trainer.save(tmp_path / "first")
    resumed = make_trainer(nn_classifier(), PLANS["data 2"])
    resumed.load(tmp_path / "first")
    resumed.save(tmp_path / "second")
    resumed.export(tmp_path / "exported")
    for folder in ("first", "second", "exported"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert tokenizer("two one")["input_ids"] == [2, 1]
        assert transformers.GenerationConfig.from_pretrained(tmp_path / folder).max_length == 77
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / folder)
        assert type(loaded) is transformers.LlamaForSequenceClassification and loaded.score.weight.shape == (3, 16)
    resumed.save(tmp_path / "second")  # over itself: it is still known as weft's own


def nn_classifier() -> nn.Module:
    torch.manual_seed(6)
    model: nn.Module = transformers.LlamaForSequenceClassification(config())
    return model


def test_a_job_names_them(tmp_path: Path) -> None:
    write_body(tmp_path / "body")
    text = f"""
        [model]
        hf = "{tmp_path / "body"}"
        architectures = ["LlamaForSequenceClassification"]
        loss = "cross-entropy"
        new_layers = {{new}}
        [dataset]
        name = "digits"
        """
    assert prepare(parse_job(text.format(new='["score"]'))).new_layers == ("score",)
    for new, words in (
        ('"score"', r'new_layers = "score" must be a list of names, such as \["score"\]'),
        ('["scor"]', 'the model has no layer "scor"'),
    ):
        with pytest.raises(Exception, match=words):
            prepare(parse_job(text.format(new=new)))
