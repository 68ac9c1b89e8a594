"""Models built on the meta device: they get right first values, everywhere the same, and are never whole anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from oracle import (
    ADAMW,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    pipeline_plan,
    small_convnet,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from whole_tensors import whole_tensors

from weft.checkpoint.local_parts import held_parameters
from weft.errors import ModelError
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Plan, Precision
from weft.training.trainer import Trainer

STAGES = ("nothing", "optimizer", "gradients", "parameters")


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter as one process would have it; collective."""
    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
    return {name: tensor.clone() for name, tensor in whole_tensors(held, trainer.mesh, lambda _, one: one.tensor)}


def on_meta(make: Any, **sizes: Any) -> Any:
    with torch.device("meta"):
        return make(**sizes)


def wide_gpt(**changes: Any) -> GPT:
    """Wide enough for statistics of its weights."""
    return GPT(GPTConfig(**{"vocab_size": 67, "context": 8, "num_layers": 4, "hidden": 64, "heads": 2, **changes}))


def check_start(trainer: Trainer) -> None:
    """GPT-2's distribution, and no two tensors alike."""
    weights = whole_weights(trainer)
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        assert float(weight.std()) == pytest.approx(0.02 / 8**0.5 if residual else 0.02, rel=0.05), name
        assert abs(float(weight.mean())) < 0.002, name
    starts = [tuple(weight.flatten()[:4].tolist()) for name, weight in weights.items() if "norm" not in name]
    assert len(set(starts)) == len(starts)


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("precision", [Precision(), Precision(compute="bf16")], ids=["own", "bf16"])
@pytest.mark.parametrize("shard", STAGES)
def test_a_gpt_starts_right_and_trains(shard: str, precision: Precision) -> None:
    torch.manual_seed(torch.distributed.get_rank())  # ranks need not agree on anything
    plan = dataclasses.replace(data_plan(2, shard=shard, check_every=1), precision=precision)
    trainer = make_trainer(on_meta(wide_gpt), plan, optimizer=ADAMW)
    check_start(trainer)
    model = trainer.named_model
    assert model.head.weight is model.embedding.weight and "head.weight" not in whole_weights(trainer)
    assert torch.equal(model.rotary.table_2TE, wide_gpt().rotary.table_2TE)
    parts = cut_evenly(token_batch(8), 2)
    first, *_, last = [float(trainer.step(*parts[trainer.data_rank])) for _ in range(6)]
    assert last < first


@ranks(4)
def test_replicas_of_parts_start_equal() -> None:
    torch.manual_seed(torch.distributed.get_rank())
    trainer = make_trainer(on_meta(wide_gpt), data_plan(2, replicate=2, shard="parameters"), optimizer=ADAMW)
    check_start(trainer)
    trainer.check_divergence()


@ranks(2)
def test_another_seed_is_another_start() -> None:
    starts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        trainer = make_trainer(on_meta(small_gpt), data_plan(2, shard="parameters"))
        starts.append(whole_weights(trainer)["embedding.weight"])
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


@ranks(2)
@pytest.mark.parametrize("shard", STAGES)
def test_batch_norms_start_right(shard: str) -> None:
    trainer = make_trainer(on_meta(small_convnet), data_plan(2, shard=shard))
    for name, buffer in trainer.named_model.named_buffers():
        expected = 1.0 if name.endswith("running_var") else 0.0
        assert bool((buffer == expected).all()), name
    images, classes = cut_evenly(image_batch(8), 2)[trainer.data_rank]
    for _ in range(2):
        assert float(trainer.step(images.float(), classes)) > 0
    assert int(trainer.named_model.stem_norm.num_batches_tracked) == 2


# ---- whose values they are ----


class Partly(nn.Module):
    """A part that its maker filled, with memory, and blocks without."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.embedding = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 17)
        self.scale = nn.Parameter(torch.empty(17))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of its own parameters only, which is what torch's layers do."""
        nn.init.constant_(self.scale, 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        logits: Tensor = self.head(x) * self.scale
        return logits


@ranks(2)
@pytest.mark.parametrize("shard", STAGES)
def test_what_has_values_keeps_them_and_layers_fill_their_own(shard: str) -> None:
    model = on_meta(Partly)
    given = model.embedding.weight.detach().clone()
    trainer = make_trainer(model, data_plan(2, shard=shard))
    weights = whole_weights(trainer)
    assert torch.equal(weights["embedding.weight"], given)
    assert torch.equal(weights["scale"], torch.full((17,), 0.5))
    for number in range(3):
        weight = weights[f"blocks.{number}.weight"]
        assert 0.1 < float(weight.std()) < 0.3 and float(weight.abs().max()) <= 8**-0.5  # Linear's uniform start
    assert float(trainer.step(*token_batch(4))) > 0


class Given(transformers.PreTrainedModel):
    """A layer with weights and without its table, which one function fills both."""

    config_class = transformers.LlamaConfig

    def __init__(self) -> None:
        super().__init__(transformers.LlamaConfig())
        self.layer = nn.Linear(4, 4, bias=False)
        self.layer.register_buffer("table", torch.empty(4, device="meta"))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.ones_(module.table)


@ranks(2)
def test_weights_beside_an_empty_table_keep_their_values() -> None:
    model = Given()
    trainer = make_trainer(model, data_plan(2))
    assert bool(model.layer.weight.any()) and bool((trainer.named_model.layer.table == 1).all())


class Unfilled(nn.Module):
    """A parameter and a table that nobody gives values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.lost = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * self.lost + self.table
        return result


@ranks(2)
@pytest.mark.parametrize("shard", STAGES)
def test_what_nobody_fills_is_refused_by_name(shard: str) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Unfilled()))
    with pytest.raises(ModelError, match=r'"1\.lost" was on the meta device'):
        make_trainer(model, data_plan(2, shard=shard))
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Unfilled()))
    model[1].lost = nn.Parameter(torch.ones(4))
    with pytest.raises(ModelError, match=r'"1\.table" was on the meta device'):
        make_trainer(model, data_plan(2, shard=shard))


class Tied(nn.Module):
    """Two stages that share a weight, and a table that nobody gives values."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", values)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        logits: Tensor = self.head(x * self.table)
        return logits


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_table_beside_a_weight_of_two_stages_is_refused_too(dtype: torch.dtype) -> None:
    model = on_meta(lambda: Tied(torch.ones(4, dtype=dtype)))
    with pytest.raises(ModelError, match='"table" was on the meta device'):
        make_trainer(model, pipeline_plan(2, cuts=(1,)), example=token_batch(2)[0])


@ranks(2)
@pytest.mark.parametrize(
    "plan", [data_plan(2), pipeline_plan(2, cuts=(2,)), tensor_plan(2)], ids=["data", "pipe", "tensor"]
)
def test_ranks_that_built_the_model_differently_are_refused(plan: Plan) -> None:
    model = wide_gpt() if torch.distributed.get_rank() == 0 else on_meta(wide_gpt)
    with pytest.raises(ModelError, match="some ranks built the model on the meta device and others did not"):
        make_trainer(model, plan, example=token_batch(2)[0])


# ---- memory ----


class Allocations:
    """The largest block of host memory that was asked for, and the most that was held, by this thread's tensors."""

    largest = 0
    peak = 0
    left = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
        assert events
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.left += event.nbytes()
            self.largest = max(self.largest, event.nbytes())
            self.peak = max(self.peak, self.left)


def tall_gpt() -> GPT:
    """So many blocks that two of them are little of the whole."""
    return wide_gpt(num_layers=12)


@pytest.mark.long
@ranks(2)
def test_the_model_is_never_whole_anywhere() -> None:
    plan: Plan = data_plan(2, shard="parameters", check_every=0)
    model = on_meta(tall_gpt)
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    block_bytes = sum(4 * parameter.numel() for parameter in model.blocks[0].parameters())
    assert 12 * block_bytes > 0.9 * num_bytes
    making = Allocations()
    with making.watching():
        trainer = make_trainer(model, plan, optimizer=torch.optim.SGD)
    assert making.left < 1.05 * num_bytes, "half of the parameters and half of the gradients"
    assert making.peak - making.left < 2.5 * block_bytes
    inputs, targets = token_batch(1)
    token = inputs[:, :1], targets[:, :1]  # next to no activations
    first, second = Allocations(), Allocations()
    for step in (first, second):
        with step.watching():
            trainer.step(*token)
    assert max(making.largest, first.largest, second.largest) < 1.05 * block_bytes
    assert second.left < 0.1 * block_bytes
    assert second.peak < 3 * block_bytes, "two blocks, the root, a gradient, and what one token leaves"
    assert first.left < 6.5 * block_bytes, "gradients on their way, kept for the next: three blocks', sent and received"
