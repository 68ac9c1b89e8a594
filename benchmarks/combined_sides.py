"""The sides of a benchmark of three axes at once: one Llama under weft, and under pipelining × FSDP2 × DTensor.

torch's side is assembled as in torchtitan: layers split by `parallelize_module`, blocks and then the stage passed to
`fully_shard`, stages to a schedule of `torch.distributed.pipelining` with static shapes and no gradient scaling. Both
have the same weights, batch, cuts and fused AdamW. `gradients_of` runs a side's step and returns the gradients that its
optimizer was about to use: whole tensors for torch, this rank's shards for weft, which together are all of them.
`worst_error` compares them with whole ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from tensor_sides import Batch, Llama, Size, adamw, make_batch, make_model
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import weft
from weft.checkpoint.local_parts import held_parameters
from weft.parallel.tensor.shares import local_part
from weft.plan.plan import Axes, Comm, Compile, Data, Pipeline, Plan, Step

SHAPE = (2, 2, 2)
"""Pipeline, data and tensor, outermost first, in weft's default order."""
PIPELINE, DATA, TENSOR = SHAPE
NUM_CHUNKS = {"interleaved": 2}
SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}

Gradients = dict[str, Tensor]
"""Tensors of this rank's stages by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model and its training step."""

    size: Size
    """`num_samples` is per microbatch."""
    num_microbatches: int
    dtype: torch.dtype = torch.float32

    def model(self) -> Llama:
        return make_model(self.size).to(self.dtype)

    def batches(self) -> list[Batch]:
        """Samples per step for each rank along data."""
        count = self.num_microbatches * self.size.num_samples
        inputs, targets = make_batch(replace(self.size, num_samples=DATA * count))
        return list(zip(inputs.split(count), targets.split(count), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One implementation of training, on this rank."""

    step: Callable[[Tensor, Tensor], float | None]
    """Forward, backward and update on this rank's part of the batch; returns the loss if it is known here."""
    optimizer: torch.optim.Optimizer
    gradients: Callable[[], Gradients]
    """Gradients as the optimizer is about to use them; collective."""
    part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole
    """This rank's shard of a whole gradient."""


def cuts(size: Size, schedule: str) -> tuple[int, ...]:
    num_stages = PIPELINE * NUM_CHUNKS.get(schedule, 1)
    return tuple(size.num_layers * stage // num_stages for stage in range(1, num_stages))


def weft_side(
    work: Work,
    *,
    schedule: str = "1f1b",
    reshard: str = "step",
    transport: str = "auto",
    compiled: bool = False,
) -> Side:
    plan = Plan(
        axes=Axes(pipeline=PIPELINE, data=DATA, tensor=TENSOR),
        step=Step(microbatches=work.num_microbatches),
        pipeline=Pipeline(schedule=schedule, chunks=NUM_CHUNKS.get(schedule, 1), cuts=cuts(work.size, schedule)),
        data=Data(shard="parameters", reshard=reshard),
        compile=Compile(blocks=compiled),
        comm=Comm(transport=transport),
    )
    example = make_batch(work.size)[0]
    trainer = weft.parallelize(work.model(), plan, loss="cross-entropy", optimizer=adamw, example=example, device="cpu")

    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)

    def part(name: str, whole: Tensor) -> Tensor:
        return local_part(whole, held[name].layout, trainer.mesh.grid, trainer.mesh.world.rank)

    return Side(
        step=lambda *batch: float(trainer.step(*batch)),
        optimizer=trainer.optimizer,
        gradients=lambda: {name: one.piece.grad.clone() for name, one in held.items()},
        part=part,
    )


class TorchStage(nn.Module):
    """Some blocks of a Llama, with its embedding or head at the model's ends."""

    def __init__(self, model: Llama, start: int, stop: int) -> None:
        super().__init__()
        self.rotary = model.rotary
        self.embedding = model.embedding if start == 0 else None
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in range(start, stop)})
        is_last = stop == len(model.blocks)
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, self.rotary)
        return x if self.head is None else self.head(self.norm(x))


def split_layers(stage: TorchStage, mesh: DeviceMesh, *, split_loss: bool) -> None:
    """DTensor's plan. `split_loss`: logits are never gathered."""
    whole = Replicate()
    if stage.embedding is not None:
        parallelize_module(stage, mesh, {"embedding": RowwiseParallel(input_layouts=whole, output_layouts=whole)})
    if stage.head is not None:
        layouts = Shard(-1) if split_loss else whole
        parallelize_module(
            stage, mesh, {"head": ColwiseParallel(output_layouts=layouts, use_local_output=not split_loss)}
        )
    inside: dict[str, Any] = {
        "attention": PrepareModuleInput(input_layouts=(whole, None), desired_input_layouts=(whole, None)),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
    }
    inside |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    inside |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    inside |= {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
    for block in stage.blocks.values():
        parallelize_module(block, mesh, inside)


def torch_side(
    work: Work,
    mesh: DeviceMesh,
    *,
    schedule: str = "1f1b",
    reshard: bool = False,
    split_loss: bool = False,
    compiled: bool = False,
) -> Side:
    """`reshard`: blocks are gathered for every microbatch and pass; otherwise once per step."""
    model, size, m = work.model(), work.size, work.num_microbatches
    rank = mesh.get_local_rank("pipeline")
    bounds = (0, *cuts(size, schedule), size.num_layers)
    num_stages = len(bounds) - 1
    numbers = range(rank, num_stages, PIPELINE)
    modules = {number: TorchStage(model, bounds[number], bounds[number + 1]) for number in numbers}
    for module in modules.values():
        split_layers(module, mesh["tensor"], split_loss=split_loss)
        if compiled and module.embedding is not None:
            # torch 2.13 loses the gradient of a collective that is still pending where a compiled block begins.
            module.embedding.register_forward_hook(lambda *given: given[-1].clone())
        for block in module.blocks.values():
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh["data"], reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=reshard)
    shape = (size.num_samples, size.num_tokens)
    between = torch.empty(*shape, size.hidden, dtype=work.dtype, device="meta", requires_grad=True)
    logits = torch.empty(*shape, size.vocab_size, dtype=work.dtype, device="meta", requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            module,
            number,
            num_stages,
            torch.device("cpu"),
            input_args=between if number else torch.empty(shape, dtype=torch.int64, device="meta"),
            output_args=between if number < num_stages - 1 else logits,
            group=mesh.get_group("pipeline"),
        )
        for number, module in modules.items()
    ]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten()) / m

    kind = SCHEDULES[schedule]
    is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    runner = kind(stages[0] if is_single else stages, m, loss_fn=loss, scale_grads=False)
    parameters = {name: each for module in modules.values() for name, each in module.named_parameters()}
    optimizer = adamw([{"params": group} for group in by_mesh(parameters.values())])
    is_last = num_stages - 1 in modules

    def step(inputs: Tensor, targets: Tensor) -> float | None:
        losses: list[Tensor] = []
        given = (inputs,) if 0 in modules else ()
        with loss_parallel() if split_loss else contextlib.nullcontext():
            runner.step(*given, target=targets if is_last else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(sum(each.detach() for each in losses)) if is_last else None

    def gradients() -> Gradients:
        return {name: each.grad.full_tensor() for name, each in parameters.items()}

    return Side(step=step, optimizer=optimizer, gradients=gradients)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split parameters by mesh: a fused update takes only tensors of one mesh at once."""
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        groups.setdefault(parameter.device_mesh, []).append(parameter)
    return list(groups.values())


def gradients_of(side: Side, batch: Batch) -> tuple[float | None, Gradients]:
    """The loss and the gradients of a side's next step; collective."""
    found: Gradients = {}
    handle = side.optimizer.register_step_pre_hook(lambda *_: found.update(side.gradients()))
    loss = side.step(*batch)
    handle.remove()
    return loss, found


def alone(work: Work) -> tuple[float, Gradients]:
    """One process's loss and gradients of the whole batch, accumulated over microbatches."""
    model, batches = work.model(), work.batches()
    total = 0.0
    for inputs, targets in batches:
        count = len(inputs) // work.num_microbatches
        for tokens, wanted in zip(inputs.split(count), targets.split(count), strict=True):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
            loss = loss / (len(batches) * work.num_microbatches)
            loss.backward()
            total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def worst_error(side: Side, found: Gradients, wanted: Gradients) -> float:
    """Largest difference of any gradient from a whole one, relative to its largest entry; NaN is infinite."""
    errors = [
        float((mine.view(-1) - side.part(name, wanted[name]).reshape(-1)).abs().amax() / wanted[name].abs().max())
        for name, mine in found.items()
        if mine.numel()
    ]
    return max((error if error == error else float("inf") for error in errors), default=0.0)
