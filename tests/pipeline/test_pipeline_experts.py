"""Mixtures of experts of Hugging Face in a pipeline, in float32, which their grouped products are made for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from families import GROUPED, text_batch
from meshes import kept_mesh
from oracle import SGD, pipeline_plan
from ranks import ranks

from weft.training.parallelize import parallelize

FEW: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": FEW | {"shared_expert_intermediate_size": 16},
    "Qwen3Moe": FEW,
}


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("Mixtral", "1f1b"),
        pytest.param("Mixtral", "zero-bubble", marks=pytest.mark.long),
        pytest.param("Qwen2Moe", "1f1b", marks=pytest.mark.long),
        pytest.param("Qwen3Moe", "1f1b", marks=pytest.mark.long),
    ],
)
def test_experts_of_all_stages_learn_as_in_one_process(kind: str, schedule: str) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**GROUPED, **EXPERTS[kind])
    )
    whole = copy.deepcopy(model)
    inputs, targets = text_batch(4)
    loss = F.cross_entropy(whole(inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    SGD(whole.parameters()).step()
    plan = pipeline_plan(2, schedule=schedule, microbatches=2, cuts=(2,))
    mesh = kept_mesh(plan)
    trainer = parallelize(model, plan, loss="cross-entropy", optimizer=SGD, example=inputs[:2], mesh=mesh)
    assert float(trainer.step(inputs, targets)) == pytest.approx(float(loss.detach()), rel=1e-5)
    true = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, true[name], rtol=1e-4, atol=1e-6, msg=name)
