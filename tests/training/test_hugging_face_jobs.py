"""Hugging Face models named in jobs: read, checked, built without memory, and filled as transformers would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import make_config, make_family

from weft.errors import ModelError, WeftError
from weft.models.hugging_face import read_hugging_face
from weft.parallel.state.materialise import fill_alone
from weft.plan.plan import Axes, Plan
from weft.plan.text import write_plan
from weft.training.run.components import context_of, prepare
from weft.training.run.job import format_job, parse_job, read_job

CPU = torch.device("cpu")
TEXT = '\n[dataset]\nname = "text"\nfiles = "corpus.txt"\nheld_out = 0.5\n[steps]\nglobal_batch = 4\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with a small Llama's configuration and 1000 bytes of text, which is the current one."""
    (tmp_path / "corpus.txt").write_text("weft " * 200)
    write_config(tmp_path, "llama", vocab_size=256)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(folder: Path, family: str, **changes: Any) -> None:
    config = make_config(family, **changes)
    config.architectures = changes.get("architectures", [type(make_family(family)).__name__])
    config.to_json_file(folder / "config.json")


def problems_of(text: str) -> str:
    with pytest.raises(WeftError) as caught:
        prepare(parse_job(text))
    return str(caught.value)


def test_a_job_names_a_configuration(folder: Path) -> None:
    job = parse_job('[model]\nhf = "config.json"\nnum_hidden_layers = 2\n' + TEXT)
    prepared = prepare(job)
    assert context_of(job) == 16 and prepared.writes_text and prepared.weights is None
    empty, filled = prepared.make_empty(), prepared.make_model()
    assert type(empty).__name__ == "LlamaForCausalLM" and len(empty.model.layers) == 2
    assert all(p.is_meta for p in empty.parameters()) and empty.config._attn_implementation == "sdpa"
    assert filled(torch.arange(6).view(1, 6)).logits.shape == (1, 6, 256)


def test_what_is_written_reads_back_from_elsewhere(folder: Path) -> None:
    (folder / "job.toml").write_text('plan = "plan.toml"\n[model]\nhf = "config.json"\nhidden_size = 64\n' + TEXT)
    write_plan(Plan(axes=Axes(data=2)), folder / "plan.toml")
    job = read_job(folder / "job.toml")
    assert job.model.name == str(folder / "config.json") and job.model.settings == {"hidden_size": 64}
    run = folder / "run"
    run.mkdir()
    write_plan(Plan(axes=Axes(data=2)), run / "plan.toml")
    (run / "job.toml").write_text(format_job(job, plan="plan.toml"))
    assert read_job(run / "job.toml") == job


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('hf = "nowhere"', ["there is no file", "give a folder with a config.json"]),
        ("hf = 3", ["[model] hf = 3 must be text"]),
        ('hf = "config.json"\nname = "gpt"', ["both a name and hf"]),
        ('hf = "corpus.txt"', ["corpus.txt is no JSON"]),
        ('hf = "config.json"\nnum_layers = 2', ['takes no setting "num_layers"', 'did you mean "num_hidden_layers"?']),
        ('hf = "config.json"\nnum_hidden_layers = "two"', ["LlamaConfig", "expected int"]),
        ('hf = "config.json"\nvocab_size = 100', ["holds token 119", "use vocab_size = 120"]),
        ('hf = "config.json"\ndtype = 3', ["[model] dtype = 3 is none of torch's"]),
        ('hf = "."\nmax_position_embeddings = 8\n[dataset]\ncontext = 16', ["context = 16 is longer", "= 8"]),
    ],
)
def test_bad_values(folder: Path, lines: str, words: list[str]) -> None:
    text = "[model]\n" + lines + (TEXT if "[dataset]" not in lines else "")
    message = problems_of(text)
    assert [word for word in words if word not in message] == [], message


def test_a_model_that_sees_what_it_is_to_predict_is_refused(folder: Path) -> None:
    write_config(folder, "bert", vocab_size=256)
    assert "BertForMaskedLM does not predict it from those before" in problems_of('[model]\nhf = "."\n' + TEXT)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"model_type": "lama"}, 'model_type "lama" is not one'),
        ({"model_type": "llama", "architectures": ["LlamaForDreams"]}, 'architecture "LlamaForDreams"'),
        ({"model_type": "bert", "architectures": ["BertModel"]}, 'architecture "BertModel", which has no head'),
        ({"model_type": "bert"}, "names no architectures"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "must be a list of names"),
        ({"model_type": "llama", "architectures": [3]}, "must be a list of names"),
        ({}, 'has no "model_type"'),
    ],
)
def test_bad_configurations(tmp_path: Path, entries: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(WeftError, match=words):
        read_hugging_face(tmp_path, {})


def test_a_configuration_that_cannot_be_built(folder: Path) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be built from its configuration"):
        read_hugging_face(folder, {"vocab_size": -1}).build()


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_dtype_by_its_old_name(tmp_path: Path, name: str) -> None:
    entries = {"model_type": "llama", "torch_dtype": "float16", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert read_hugging_face(tmp_path, {}).config.dtype == torch.float32
    assert read_hugging_face(tmp_path, {name: "bfloat16"}).config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "architecture", "changes", "continues"),
    [
        ("xlm", "XLMWithLMHeadModel", {}, False),
        ("xlm", "XLMWithLMHeadModel", {"causal": True}, True),
        ("bart", "BartForCausalLM", {}, True),
        ("bert", "BertLMHeadModel", {}, False),
        ("bert", "BertLMHeadModel", {"is_decoder": True}, True),
    ],
)
def test_which_models_continue_text(
    tmp_path: Path, kind: str, architecture: str, changes: dict[str, Any], continues: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    assert read_hugging_face(tmp_path, changes).continues_text == continues


def test_a_folder_with_weights_is_pretrained(tmp_path: Path) -> None:
    model = make_family("gpt2")
    model.save_pretrained(tmp_path)
    found = read_hugging_face(tmp_path, {})
    assert found.weights == tmp_path and found.kind is type(model)
    assert read_hugging_face(tmp_path / "config.json", {}).weights is None
    assert {n: p.shape for n, p in found.build().named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt-neox", "bert", "roberta", "distilbert", "vit"])
def test_first_values_are_of_the_right_kind(family: str) -> None:
    """Buffers are those of a model built with memory; parameters have its distribution."""
    known = make_family(family)
    with torch.device("meta"):
        model = make_family(family)
    fill_alone(model, 0, CPU)
    for name, buffer in known.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, known_parameter in known.named_parameters():
        there, parameter = values[name], known_parameter.detach()
        if float(parameter.std(correction=0)) == 0:
            assert torch.equal(there, parameter), name
        else:
            assert float(there.std()) == pytest.approx(float(parameter.std()), rel=0.5), name
    starts = [tuple(p.flatten()[:4].tolist()) for p in values.values() if float(p.std(correction=0)) > 0]
    assert len(set(starts)) == len(starts), "two tensors alike"


class HalfFilled(transformers.PreTrainedModel):
    """Its own first values are those of weights; biases are torch's."""

    config_class = transformers.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(64, 64)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.001)


def test_what_a_model_fills_is_not_drawn_again_for_what_it_leaves() -> None:
    with torch.device("meta"):
        model = HalfFilled(make_config("llama"))
    fill_alone(model, 0, CPU)
    assert float(model.layer.weight.detach().std()) == pytest.approx(0.001, rel=0.1)
    assert 0.02 < float(model.layer.bias.detach().std()) < 0.2


@pytest.mark.parametrize("values", [torch.ones(4), torch.arange(4), torch.eye(2, dtype=torch.bool)], ids=str)
def test_an_unfilled_buffer_is_refused_in_one_process_too(values: torch.Tensor) -> None:
    with torch.device("meta"):
        layer = torch.nn.Linear(4, 4)
        layer.register_buffer("table", values.to("meta"))
    with pytest.raises(ModelError, match='"table" was on the meta device'):
        fill_alone(layer, 0, CPU)
