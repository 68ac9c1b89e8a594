"""`trainer.describe()`, and that nothing of torch stays replaced when a step is over, however it ends."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from oracle import (
    cut_evenly,
    data_plan,
    make_trainer,
    pipeline_plan,
    sequence_plan,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import ranks
from torch import nn

from weft.parallel.wrapping.replacements import WHOLE_ATTENTION
from weft.plan.plan import Compile, Recompute
from weft.training.trainer import Trainer

CHECKPOINTS = (
    "torch.utils.checkpoint.CheckpointFunction: recomputes in the schedule's own backward pass, also with "
    "use_reentrant=True"
)

CHECKPOINTS = (
    "torch.utils.checkpoint.CheckpointFunction: recomputes in the schedule's own backward pass, also with "
    "use_reentrant=True"
)


def step(trainer: Trainer, batch: Any) -> torch.Tensor:
    return trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])


def section(text: str, title: str) -> list[str]:
    """The lines below a title, without indentation."""
    found = next(part for part in text.split("\n\n") if part.startswith(title))
    return [line.strip() for line in found.splitlines()[1:]]


# ---- replacements ----


class Failing(nn.Module):
    """A loss that fails on demand, and sees what attention is meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert F.scaled_dot_product_attention is WHOLE_ATTENTION, "losses are taken outside of the pass"
        if self.fails:
            raise RuntimeError("on demand")
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())


@ranks(2)
def test_attention_is_torchs_own_after_an_error_and_without_a_trainer() -> None:
    loss, has_fast_path = Failing(), torch.backends.mha.get_fastpath_enabled()
    batch = token_batch(2)
    trainer = make_trainer(small_gpt(), sequence_plan(ring=2), loss=loss, example=batch[0])
    lines = section(trainer.describe(), "replaced while a step runs")
    assert any(line.startswith("torch.nn.functional.scaled_dot_product_attention: attends over all") for line in lines)
    assert any("fast path" in line for line in lines)
    step(trainer, batch)
    assert F.scaled_dot_product_attention is WHOLE_ATTENTION
    with trainer.replacements:
        assert F.scaled_dot_product_attention is not WHOLE_ATTENTION
        assert not torch.backends.mha.get_fastpath_enabled()
    loss.fails = True
    with pytest.raises(RuntimeError, match="on demand"):
        step(trainer, batch)
    assert F.scaled_dot_product_attention is WHOLE_ATTENTION
    assert torch.backends.mha.get_fastpath_enabled() == has_fast_path
    del trainer
    gc.collect()
    assert F.scaled_dot_product_attention is WHOLE_ATTENTION


@ranks(2)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_donated_buffers_are_off_only_in_steps_of_compiled_zero_bubble_schedules() -> None:
    config, batch = torch._functorch.config, token_batch(4)
    plan = pipeline_plan(2, schedule="zero-bubble", microbatches=2)
    plain = make_trainer(small_gpt(), plan, example=batch[0][:2])
    assert section(plain.describe(), "replaced while a step runs") == [CHECKPOINTS]
    compiled = dataclasses.replace(plan, compile=Compile(blocks=True))
    trainer = make_trainer(small_gpt(), compiled, example=batch[0][:2])
    assert config.donated_buffer
    (first, line) = section(trainer.describe(), "replaced while a step runs")
    assert first == CHECKPOINTS and line.startswith("torch._functorch.config.donated_buffer: ")
    with trainer.replacements:
        assert not config.donated_buffer
    assert config.donated_buffer


# ---- the text ----


def test_one_rank() -> None:
    trainer = make_trainer(small_gpt(), dataclasses.replace(data_plan(1), recompute=Recompute(policy="full")))
    text = trainer.describe()
    assert section(text, "plan: one rank") == ["rank 0 on cpu: alone"]
    assert section(text, "process groups") == ["none"]
    assert section(text, "replaced while a step runs") == ["nothing"]
    tree = section(text, "model: GPT")
    assert "0 to 1, each the same: Block" in tree
    assert (
        tree.count("- forward, by recompute: keeps its inputs, and computes the rest again in the backward pass") == 1
    )
    assert "weight: 17×16, whole" in tree


@pytest.mark.long
@ranks(8)
def test_pipeline_tensor_and_zero() -> None:
    batch = token_batch(8)
    plan = tensor_plan(2, data=2, pipeline=2, shard="parameters", microbatches=2, transport="c10d")
    plan = dataclasses.replace(plan, recompute=Recompute(policy="selective"))
    plan = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, cuts=(2,)))
    trainer = make_trainer(small_gpt(num_layers=4, heads=4), plan, example=batch[0][:2])
    step(trainer, batch)
    text, rank = trainer.describe(), trainer.mesh.world.rank
    places = trainer.mesh.grid.coordinates(rank)
    used = [axis for axis in trainer.mesh.grid.axes.order if trainer.mesh.size(axis) > 1]
    (line,) = section(text, "plan: ")
    assert line == f"rank {rank} on cpu: " + ", ".join(f"{axis} {places[axis]}" for axis in used)
    tree = section(text, "model: GPT")
    here, there = places["pipeline"], 1 - places["pipeline"]
    assert f"{2 * here} to {2 * here + 1}, each the same: Block (stage {here})" in tree
    assert f"{2 * there} to {2 * there + 1}, each the same: placeholder (stage {there})" in tree
    for line in (
        "- forward, by tensor: sums partial results over the tensor axis",
        "- forward, by recompute: keeps its inputs and products with weights, and computes the rest again in the "
        "backward pass",
        "- forward, by pipeline: runs only with its own stage, else returns received values or placeholders",
        "- gradient hook of each parameter: weft.sync.gradient_hooks",
        "- state_dict_pre hook, by zero: refuses to save parameters that no rank has whole",
    ):
        assert line in tree, line
    start, stop = 12 * places["tensor"], 12 * places["tensor"] + 12
    assert any(
        line.startswith(
            f"weight: 24×16 -> 12×16, dim 0 split over tensor, here {start}:{stop}; ZeRO-3 over data, here elements "
        )
        for line in tree
    )
    groups = section(text, "process groups")
    for axis in ("pipeline", "data", "tensor"):
        ranks_along = ", ".join(map(str, trainer.mesh.grid.ranks_along((axis,), rank)))
        assert any(line.startswith(f"{axis}: ranks {ranks_along}, by gloo, for ") for line in groups)
    assert section(text, "replaced while a step runs") == [CHECKPOINTS]
