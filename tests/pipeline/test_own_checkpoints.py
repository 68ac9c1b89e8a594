"""Checkpoints of the model's own around its blocks, as Hugging Face's models have them, in a pipeline."""

from __future__ import annotations

import pytest
import torch
from families import make_family, text_batch, verified
from meshes import kept_mesh
from oracle import SGD, pipeline_plan
from ranks import ranks
from torch import Tensor

from weft.training.parallelize import parallelize


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_reentrant_checkpoints_around_blocks_train_every_stage(schedule: str) -> None:
    model = make_family("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    chunks, cuts = (2, (1, 2, 3)) if schedule == "interleaved" else (1, (2,))
    verified(model, pipeline_plan(2, schedule=schedule, chunks=chunks, cuts=cuts, microbatches=2), [text_batch(4)])


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_recomputed_by_the_model_draw_what_they_drew(reentrant: bool) -> None:
    def train(with_checkpoints: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = make_family("gpt2", resid_pdrop=0.5, embd_pdrop=0.1).double()
        if with_checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        plan = pipeline_plan(2, microbatches=2, cuts=(2,))
        inputs, targets = text_batch(4)
        mesh = kept_mesh(plan)
        trainer = parallelize(model, plan, loss="cross-entropy", optimizer=SGD, example=inputs[:2], mesh=mesh)
        torch.manual_seed(4)
        trainer.step(inputs, targets)
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    kept, recomputed = train(False), train(True)
    for name, weight in kept.items():
        torch.testing.assert_close(recomputed[name], weight, rtol=1e-10, atol=1e-12, msg=name)
