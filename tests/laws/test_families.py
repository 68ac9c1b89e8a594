"""Hugging Face models of several families under plans of every axis, from the meta device and pretrained weights."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any
from unittest import TestCase, mock

import pytest
import torch
from families import FAMILIES, PLANS, batch_of, make_family, packed, padded, recomputed, verified
from oracle import make_trainer, pipeline_plan, sequence_plan, tensor_plan
from ranks import ranks
from torch import Tensor

from weft.checkpoint.local_parts import held_parameters
from weft.errors import WeftError
from weft.parallel.state.materialise import draw_seed, fill_alone
from weft.plan.plan import Plan
from weft.training.parallelize import parallelize
from weft.training.setup import probe

ENCODERS = ("bert", "bert classifier", "roberta", "distilbert", "vit")
ENCODER_PLANS = ("data", "zero 3", "zero 3 full", "1f1b", "interleaved", "zero-bubble", "tensor")
MORE_OF_ENCODERS = {
    ("bert", "ring"), ("roberta", "ring"), ("distilbert", "ring"), ("vit", "ring"), ("distilbert", "tensor sequence"),
    ("bert", "tensor sequence"), ("roberta", "tensor sequence"), ("bert classifier", "tensor sequence"),
}  # fmt: skip
SMOKE = {
    ("llama", "zero 3 full"),
    ("qwen2", "tensor"),
    ("gpt-neox", "ring"),
    ("bert", "1f1b"),
    ("bert", "tensor sequence"),
}
"""Every kind of plan once; the rest is long. Four ranks are in `test_hugging_face_example.py`."""


def cases(world: int) -> list[Any]:
    found = []
    for (number, (name, (size, _))), (place, family) in itertools.product(
        enumerate(PLANS.items()), enumerate(FAMILIES)
    ):
        if size != world or family == "gemma 2":
            continue
        if family in ENCODERS and name not in ENCODER_PLANS and (family, name) not in MORE_OF_ENCODERS:
            continue
        if (number + place) % 3 and (family, name) not in SMOKE | MORE_OF_ENCODERS:
            continue  # every family meets every third plan, and every plan every third family
        marks = () if (family, name) in SMOKE else (pytest.mark.long,)
        found.append(pytest.param(family, name, marks=marks, id=f"{family}-{name}"))
    return found


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return make_family(family)


def run(family: str, plan: Plan, change: Any = None, **changes: Any) -> None:
    batches = [batch_of(family, size, seed=seed) for seed, size in enumerate((8, 6))]
    verified(make_family(family, **changes), plan, [change(*b) for b in batches] if change else batches)


@pytest.mark.sampled(2, long=18)
@ranks(2)
@pytest.mark.parametrize(("family", "name"), cases(2))
def test_two_ranks(family: str, name: str) -> None:
    run(family, PLANS[name][1])


@pytest.mark.sampled(long=4)
@ranks(4)
@pytest.mark.parametrize(("family", "name"), cases(4))
def test_four_ranks(family: str, name: str) -> None:
    run(family, PLANS[name][1])


@pytest.mark.sampled(long=4)
@ranks(8, timeout_s=120)
@pytest.mark.parametrize(("family", "name"), cases(8))
def test_eight_ranks(family: str, name: str) -> None:
    run(family, PLANS[name][1])


@pytest.mark.sampled(long=3)
@ranks(2)
@pytest.mark.parametrize(
    ("family", "name", "change", "changes"),
    [
        ("llama", "1f1b", padded, {}),
        ("tied llama", "tensor sequence", packed, {}),
        pytest.param("llama", "zero 3 full", packed, {"use_cache": False}, marks=pytest.mark.long),
        pytest.param("llama", "1f1b", packed, {"use_cache": False}, marks=pytest.mark.long),
        pytest.param("qwen3", "tensor sequence", padded, {}, marks=pytest.mark.long),
        pytest.param("gpt2", "interleaved", padded, {}, marks=pytest.mark.long),
        pytest.param("bert", "zero-bubble", padded, {}, marks=pytest.mark.long),
        pytest.param("gpt-neox", "zero-bubble", packed, {"use_cache": False}, marks=pytest.mark.long),
    ],
)
def test_padding_and_documents(family: str, name: str, change: Any, changes: dict[str, Any]) -> None:
    run(family, PLANS[name][1], change, **changes)


NO_TOKENS = "has shape .2, 64., without a dim of tokens"
ODD = "cannot split 17 tokens over .axes. tensor = 2"


@ranks(2)
@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        pytest.param("vit", "tensor sequence", ODD, marks=pytest.mark.long),
        ("bert classifier", "ring", NO_TOKENS),
        pytest.param("bert classifier", "ulysses", NO_TOKENS, marks=pytest.mark.long),
    ],
    ids=lambda value: value[:15],
)
def test_what_cannot_be_split_is_refused_before_a_step(family: str, name: str, words: str) -> None:
    inputs, _ = batch_of(family, 4)
    for model in (make_family(family), on_meta(family)):
        with pytest.raises(WeftError, match=words):
            make_trainer(model, PLANS[name][1], example=inputs.float() if family == "vit" else inputs)


@ranks(2)
def test_what_is_too_large_to_be_tried_is_said() -> None:
    inputs, _ = batch_of("llama", 4)
    with mock.patch.object(probe, "_MOST_FILLED_BYTES", 2**10), TestCase().assertLogs("weft") as logged:
        logging.getLogger("weft").info("others say nothing")
        make_trainer(on_meta("llama"), PLANS["tensor"][1], example=inputs)
    said = [line for line in logged.output if "tensor = 2, computes what the whole one does was not tried" in line]
    assert len(said) == (torch.distributed.get_rank() == 0) and all("run weft verify on a small" in s for s in said)


@pytest.mark.sampled(long=3)
@ranks(2)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma 2", "ring"),
        pytest.param("gemma 2", "ulysses", marks=pytest.mark.long),
        pytest.param("gemma 2", "ring selective", marks=pytest.mark.long),
        pytest.param("windowed mistral", "ring", marks=pytest.mark.long),
        pytest.param("windowed mistral", "ulysses", marks=pytest.mark.long),
    ],
)
def test_windows_and_soft_caps_over_split_sequences(family: str, name: str) -> None:
    run(family, PLANS[name][1])


# ---- from the meta device ----


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def assert_parts_of(trainer: Any, whole: dict[str, Tensor]) -> None:
    """Check that a rank holds its shards of these tensors."""
    from weft.parallel.tensor.shares import local_part

    mesh = trainer.mesh
    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
    assert held
    for name, one in held.items():
        assert torch.equal(one.tensor, local_part(whole[name], one.layout, mesh.grid, mesh.world.rank)), name


EMPTY_PLANS = {
    "zero 3": sequence_plan(data=2, shard="parameters"),
    "tensor": tensor_plan(2),
    "pipeline": pipeline_plan(2, microbatches=2, cuts=(2,)),
    "ring": recomputed(sequence_plan(ring=2), "full"),
}


@pytest.mark.sampled(2, long=3)
@ranks(2)
@pytest.mark.parametrize("family", ["tied llama", pytest.param("gpt2", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", list(EMPTY_PLANS))
def test_first_values_do_not_depend_on_the_plan(family: str, name: str) -> None:
    alone, model = without_dropout(on_meta(family)), without_dropout(on_meta(family))
    torch.manual_seed(5)
    fill_alone(alone, draw_seed(), torch.device("cpu"))
    torch.manual_seed(5 + torch.distributed.get_rank())  # the first rank's seed counts
    inputs, targets = batch_of(family, 8)
    trainer = make_trainer(model, EMPTY_PLANS[name], example=inputs)
    assert_parts_of(trainer, dict(alone.named_parameters()))
    for buffer_name, buffer in trainer.named_model.named_buffers():
        assert torch.equal(buffer, alone.get_buffer(buffer_name)), buffer_name
    half = slice(4 * trainer.data_rank, 4 * trainer.data_rank + 4) if trainer.data_size == 2 else slice(None)
    expected = torch.nn.functional.cross_entropy(alone(inputs).logits.flatten(0, 1), targets.flatten()).detach()
    assert float(trainer.step(inputs[half], targets[half])) == pytest.approx(float(expected), rel=1e-5)


@ranks(2)
@pytest.mark.parametrize("name", ["zero 3", "pipeline", pytest.param("tensor", marks=pytest.mark.long)])
def test_pretrained_weights(tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    model = make_family("tied llama")
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(tmp_path)
    torch.distributed.barrier()
    inputs, _ = batch_of("tied llama", 4)
    trainer = parallelize(
        on_meta("tied llama"),
        EMPTY_PLANS[name],
        loss="cross-entropy",
        optimizer=torch.optim.SGD,
        example=inputs,
        weights=tmp_path,
        device="cpu",
    )
    assert_parts_of(trainer, dict(model.named_parameters()))
