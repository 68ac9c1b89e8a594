"""Hugging Face's folders: transformers loads what weft saved, and split models take pretrained weights from folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import data_plan, make_trainer, pipeline_plan, small_convnet, small_gpt, tensor_plan
from ranks import ranks
from safetensors.torch import load_file, save_file
from torch import nn

from weft.checkpoint import pretrained as weights
from weft.checkpoint.pretrained import load_weights
from weft.errors import CheckpointError
from weft.plan.plan import Plan
from weft.training.trainer import Trainer

transformers = pytest.importorskip("transformers")

PLANS = {
    "data 2": data_plan(2),
    "zero 3": data_plan(2, shard="parameters"),
    "tensor 2": tensor_plan(2),
    "pipeline 2": pipeline_plan(2, microbatches=2, cuts=(1,)),
}
TOKENS = torch.arange(16).view(2, 8)


def llama(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def gpt2(seed: int) -> nn.Module:
    """Its head is its embedding."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=32)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


MODELS = {"llama": llama, "gpt2": gpt2}


def trainer_of(model: nn.Module, plan: Plan, **changes: Any) -> Trainer:
    return make_trainer(model, plan, **{"example": TOKENS[:1], **changes})


def on_first(action: Any) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(TOKENS).logits
        return logits


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_a_checkpoint(tmp_path: Path, model: str, plan: str) -> None:
    trainer_of(MODELS[model](0), PLANS[plan]).save(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(MODELS[model](0))
    assert torch.equal(outputs(loaded), outputs(MODELS[model](0)))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == [type(loaded).__name__]
    assert (tmp_path / "saved" / "generation_config.json").is_file()


def portable(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("model-*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_pretrained_weights_fill_a_split_model(tmp_path: Path, model: str, plan: str) -> None:
    """From several files, from a bare model without the prefix, and from one of weft's own checkpoints."""
    source = MODELS[model](1)
    on_first(lambda: source.save_pretrained(tmp_path / "sharded", max_shard_size="4KB"))
    named = dict(source.named_parameters())
    prefix = f"{source.base_model_prefix}."
    bare = {name.removeprefix(prefix): one.detach().clone() for name, one in named.items()}
    on_first(lambda: (tmp_path / "bare").mkdir())
    on_first(lambda: save_file(bare, tmp_path / "bare" / "model.safetensors"))
    trainer = trainer_of(MODELS[model](0), PLANS[plan])
    trainer.save(tmp_path / "other")
    for name in ("sharded", "bare"):
        load_weights(trainer, tmp_path / "other")
        load_weights(trainer, tmp_path / name)
        trainer.save(tmp_path / f"after {name}")
        found = portable(tmp_path / f"after {name}")
        assert found.keys() == source.state_dict().keys(), "a tied weight is there under each of its names"
        assert all(torch.equal(found[key], one) for key, one in source.state_dict().items())


@ranks(2)
def test_values_are_converted_and_extra_tensors_are_logged_once(tmp_path: Path) -> None:
    trainer = trainer_of(llama(0), PLANS["tensor 2"])
    source = dict(llama(1).named_parameters())
    halves = {name: one.detach().bfloat16() for name, one in source.items()}
    halves["rotary.old"] = torch.ones(2)
    on_first(lambda: (tmp_path / "half").mkdir())
    on_first(lambda: save_file(halves, tmp_path / "half" / "weights.safetensors"))
    with mock.patch.object(weights.log, "warning") as said:
        load_weights(trainer, tmp_path / "half")
    assert said.call_count == (dist.get_rank() == 0)
    assert all(call.args[2:] == (1, "rotary.old") for call in said.call_args_list)
    trainer.save(tmp_path / "saved")
    found = portable(tmp_path / "saved")
    assert all(torch.equal(found[name], halves[name].float()) for name in source)


@ranks(2)
def test_all_that_is_missing_or_misshapen_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    trainer = trainer_of(llama(0), PLANS["pipeline 2"])
    broken = {name: one.detach().clone() for name, one in llama(1).named_parameters()}
    del broken["model.layers.0.mlp.up_proj.weight"], broken["lm_head.weight"]
    broken["model.layers.1.mlp.up_proj.weight"] = torch.ones(2, 3)
    on_first(lambda: (tmp_path / "broken").mkdir())
    on_first(lambda: save_file(broken, tmp_path / "broken" / "model.safetensors"))
    before = {name: one.detach().clone() for name, one in trainer.named_model.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(trainer, tmp_path / "broken")
    for words in (
        "does not hold the weights of this model; nothing was changed",
        '"model.layers.0.mlp.up_proj.weight" is in no file',
        '"lm_head.weight" is in no file',
        '"model.layers.1.mlp.up_proj.weight" has shape [24, 16] here, [2, 3] in the files',
    ):
        assert words in str(caught.value)
    assert all(torch.equal(one, before[name]) for name, one in trainer.named_model.named_parameters())


@ranks(2)
def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(small_gpt(), PLANS["data 2"])

    def make() -> None:
        for name, file in (("pickles", "pytorch_model.bin"), ("nothing", "README"), ("damaged", "model.safetensors")):
            (tmp_path / name).mkdir()
            (tmp_path / name / file).write_bytes(b"x")

    on_first(make)
    for name, words in (
        ("pickles", "pickles only .pytorch_model.bin.*convert them once"),
        ("nothing", "holds no .*safetensors file"),
        ("nowhere", "is not a folder"),
        ("damaged", "is not a whole safetensors file"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_weights(trainer, tmp_path / name)


@ranks(2)
def test_buffers_come_too_and_damage_to_a_checkpoint_is_found(tmp_path: Path) -> None:
    source = make_trainer(small_convnet(), PLANS["data 2"])
    with torch.no_grad():
        for buffer in source.named_model.buffers():
            buffer += 3
    source.save(tmp_path / "saved")
    trainer = make_trainer(small_convnet(), data_plan(2, shard="parameters"))
    load_weights(trainer, tmp_path / "saved")
    pairs = zip(source.named_model.buffers(), trainer.named_model.buffers(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    file = tmp_path / "saved" / "model-00001-of-00001.safetensors"
    on_first(lambda: file.write_bytes(file.read_bytes()[:-1] + b"\x55"))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_weights(trainer, tmp_path / "saved")
