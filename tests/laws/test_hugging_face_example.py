"""The Hugging Face example gives the same losses under its three plans, and the fine-tuning script runs."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import make_family
from ranks import ranks

from weft.plan.plan import Axes, Data, Plan
from weft.plan.text import write_plan
from weft.training.run.job import Part, read_job
from weft.training.run.loop import train

EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face"
PLANS = ("zero", "pipeline-tensor", "ring-data")


@pytest.mark.long
@ranks(4, timeout_s=90)
def test_the_same_losses_under_three_plans(tmp_path: Path) -> None:
    losses = []
    for name in PLANS:
        job = read_job(EXAMPLE / f"{name}.toml")
        smaller = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
        short = replace(job.steps, total=2, evaluate_batches=1)
        plan = job.plan
        assert plan is not None
        if plan.axes.pipeline > 1:
            plan = replace(plan, pipeline=replace(plan.pipeline, cuts=(1,)))
        job = replace(
            job,
            steps=short,
            plan=plan,
            model=replace(job.model, settings=smaller),
            dataset=replace(job.dataset, settings={"context": 16}),
            schedule=Part(name="constant"),
        )
        train(job, directory=tmp_path / name)
        torch.distributed.barrier()
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert (tmp_path / name / "checkpoints" / "step-2" / "config.json").exists()
    assert len(losses[0]) == 2
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=1e-5)


@ranks(2)
def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        model = make_family("llama", vocab_size=256, max_position_embeddings=128, num_hidden_layers=1)
        model.to(torch.bfloat16).save_pretrained(tmp_path / "pretrained")
        write_plan(Plan(axes=Axes(data=2), data=Data(shard="parameters")), tmp_path / "plan.toml")
    torch.distributed.barrier()
    example = runpy.run_path(str(EXAMPLE / "finetune.py"))
    example["train"].__globals__["NUM_STEPS"] = 2
    trainer = example["train"](tmp_path / "pretrained", tmp_path / "plan.toml", tmp_path / "output")
    assert trainer.steps_done == 2 and {piece.tensor.dtype for piece in trainer.sync.pieces} == {torch.float32}
    assert len(example["continue_text"](tmp_path / "output", "def ", num_tokens=4)) >= 4
