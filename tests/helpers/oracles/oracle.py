"""A training loop in plain torch, and small models, for tests that compare weft's trainer with it.

`train_alone` sees whole batches, never a microbatch or a rank; `train_parallel` gets each rank's part of the same
batches. Both record every step, and `assert_same` compares the two. A loss here returns (sum, count),
from which one process averages over everything; the test chooses the trainer's loss.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from meshes import kept_mesh
from torch import Tensor, nn

from weft.layout import part_of
from weft.models.convnet import ConvNet, ConvNetConfig
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Comm, Data, Pipeline, Plan, Step
from weft.plan.plan import Sequence as SequenceSection
from weft.plan.plan import Tensor as TensorSection
from weft.training.parallelize import parallelize
from weft.training.trainer import Trainer

Batch = tuple[Any, Any]
SumAndCount = Callable[[Any, Any], tuple[Tensor, Any]]
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]

SGD: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW: MakeOptimizer = functools.partial(torch.optim.AdamW, lr=1e-3)


def data_plan(
    data: int,
    *,
    microbatches: int = 1,
    clip_norm: float = 0.0,
    buffers: str = "synchronise",
    check_every: int = 100,
    bucket_bytes: int = 26214400,
    shard: str = "nothing",
    reshard: str = "step",
    replicate: int = 1,
    transport: str | None = None,
) -> Plan:
    """A plan of data parallelism from keyword arguments; the default transport is the test run's."""
    wire = {} if transport is None else {"transport": transport}
    return Plan(
        axes=Axes(data=data, replicate=replicate),
        step=Step(microbatches=microbatches, clip_norm=clip_norm),
        data=Data(buffers=buffers, check_every=check_every, shard=shard, reshard=reshard),
        comm=Comm(bucket_bytes=bucket_bytes, **wire),
    )


def pipeline_plan(
    pipeline: int,
    *,
    schedule: str = "1f1b",
    chunks: int = 1,
    cuts: tuple[int, ...] = (),
    vertical_sync: bool = False,
    data: int = 1,
    **settings: Any,
) -> Plan:
    """A plan of a pipeline from keyword arguments; the rest as for `data_plan`."""
    return dataclasses.replace(
        data_plan(data, **settings),
        axes=Axes(pipeline=pipeline, data=data),
        pipeline=Pipeline(schedule=schedule, chunks=chunks, cuts=cuts, vertical_sync=vertical_sync),
    )


def tensor_plan(tensor: int, *, data: int = 1, pipeline: int = 1, sequence: bool = False, **settings: Any) -> Plan:
    """A tensor-parallel plan from keyword arguments; the rest as for `data_plan` or `pipeline_plan`."""
    if pipeline == 1:
        plan = data_plan(data, **settings)
    else:
        plan = pipeline_plan(pipeline, data=data, **settings)
    return dataclasses.replace(
        plan, axes=dataclasses.replace(plan.axes, tensor=tensor), tensor=TensorSection(sequence=sequence)
    )


def sequence_plan(
    *,
    ring: int = 1,
    ulysses: int = 1,
    tensor: int = 1,
    split_tokens: bool = False,
    layout: str = "zigzag",
    variant: str = "ring",
    **settings: Any,
) -> Plan:
    """A sequence-parallel plan from keyword arguments; the rest as for `tensor_plan`."""
    plan = tensor_plan(tensor, sequence=split_tokens, **settings)
    return dataclasses.replace(
        plan,
        axes=dataclasses.replace(plan.axes, ring=ring, ulysses=ulysses),
        sequence=SequenceSection(layout=layout, variant=variant),
    )


def small_gpt(**changes: Any) -> GPT:
    sizes = {"vocab_size": 17, "context": 8, "num_layers": 2, "hidden": 16, "heads": 2, "mlp_hidden": 24}
    return GPT(GPTConfig(**{**sizes, **changes}))


def small_convnet(**changes: Any) -> ConvNet:
    sizes = {"classes": 5, "channels_in": 1, "width": 4, "num_blocks": 2}
    return ConvNet(ConvNetConfig(**{**sizes, **changes}))


def token_batch(num_samples: int, *, seed: int = 0) -> Batch:
    """Tokens for `small_gpt` and the tokens after them."""
    text = torch.randint(17, (num_samples, 9), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].clone(), text[:, 1:].clone()


def image_batch(num_samples: int, *, seed: int = 0) -> Batch:
    """Images for `small_convnet` and their classes."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_samples, 1, 6, 6, generator=generator, dtype=torch.float64),
        torch.randint(5, (num_samples,), generator=generator),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Loss, gradients and weights after one step."""

    loss: float
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]


def look_at(model: nn.Module, loss: float) -> Seen:
    named = dict(model.named_parameters())
    return Seen(
        loss=loss,
        gradients={name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()},
        weights={name: p.detach().clone() for name, p in named.items()},
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over targets other than -100, and their number."""
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum")
    return total, (targets != -100).sum()


def train_alone(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: SumAndCount = cross_entropy,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: SGD(model.parameters()),
    clip_norm: float = 0.0,
    schedule: Callable[[int], float] | None = None,
) -> list[Seen]:
    """Train in one process on whole batches, with torch's own clipping and scheduler."""
    chosen = optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, schedule) if schedule else None
    seen = []
    for inputs, targets in batches:
        chosen.zero_grad(set_to_none=True)
        total, count = loss(call(model, inputs), targets)
        (total / count).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        chosen.step()
        if scheduler is not None:
            scheduler.step()
        seen.append(look_at(model, float((total / count).detach())))
    return seen


def train_parallel(trainer: Trainer, parts: Sequence[Sequence[Batch]]) -> list[Seen]:
    """`parts[step][rank]` is a rank's part of a step's batch."""
    return [look_at(trainer.named_model, float(trainer.step(*step_parts[trainer.data_rank]))) for step_parts in parts]


def make_trainer(model: nn.Module, plan: Plan, **changes: Any) -> Trainer:
    """A trainer with SGD and the built-in loss, unless the test says otherwise. Its process groups are kept ones."""
    given = {"loss": "cross-entropy", "optimizer": SGD, "device": "cpu", **changes}
    return parallelize(model, plan, **{"mesh": kept_mesh(plan) if given["device"] == "cpu" else None, **given})


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def train_on_tokens(trainer: Trainer, num_steps: int) -> list[float]:
    """Losses of steps on batches for `small_gpt` that depend on the step alone."""
    losses = []
    for _ in range(num_steps):
        batch = token_batch(8 - trainer.steps_done % 3, seed=trainer.steps_done)
        losses.append(float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])))
    return losses


def kept_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that a forward pass keeps for the backward pass, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """A batch of tensors cut into one part per rank, of these numbers of samples."""
    inputs, targets = batch
    assert sum(sizes) == len(inputs)
    return list(zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True))


def cut_evenly(batch: Batch, num_ranks: int) -> list[Batch]:
    spans = [part_of(len(batch[0]), rank, num_ranks) for rank in range(num_ranks)]
    return cut(batch, [stop - start for start, stop in spans])


def assert_same(mine: Sequence[Seen], theirs: Sequence[Seen], *, tolerance: float = 1e-10) -> None:
    """Compare every loss, gradient and weight after every step; a gradient of None must be None on both sides."""
    assert len(mine) == len(theirs)
    for step, (here, there) in enumerate(zip(mine, theirs, strict=True), start=1):
        assert abs(here.loss - there.loss) <= tolerance * abs(there.loss), f"loss of step {step}"
        assert here.gradients.keys() == there.gradients.keys()
        for what, ours, true in (
            ("gradient", here.gradients, there.gradients),
            ("weight", here.weights, there.weights),
        ):
            for name, expected in true.items():
                found = ours[name]
                where = f"{what} {name} after step {step}"
                assert (found is None) == (expected is None), f"{where}: {found} where {expected} was expected"
                if found is not None and expected is not None:
                    off = float((found - expected).abs().max())
                    assert off <= tolerance * max(float(expected.abs().max()), 1e-6), f"{where} is off by {off}"


class MLP(nn.Module):
    """Three layers, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


def batch_of(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (num_samples,), generator=generator)


def batches_of(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [batch_of(size, seed) for seed, size in enumerate(sizes)]


def check_against_one_process(
    model: nn.Module, plan: Plan, parts: Sequence[Sequence[tuple[Tensor, Tensor]]], **changes: Any
) -> None:
    """Train the model under the plan and a copy in one process on the same steps, and compare after every step."""
    alone = copy.deepcopy(model)
    mine = train_parallel(make_trainer(model, plan, **changes), parts)
    whole = [(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in parts]
    assert_same(mine, train_alone(alone, whole, clip_norm=plan.step.clip_norm))
