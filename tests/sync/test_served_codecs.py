"""Training with servers and codecs through the trainer, against one process that computes by the rules of codecs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import MLP, SGD, batch_of, cut, small_gpt, token_batch
from ranks import gathered, ranks
from served_rules import some_codec
from served_training import served, server_plan
from torch import Tensor, nn

from weft.errors import PlanError
from weft.plan.plan import Codec, Plan, Precision
from weft.server.worker_mesh import WorkerMesh
from weft.sync.served import ServedSync
from weft.training.trainer import Trainer
from weft.verification.compression.rules import Part, Rule, make_rule

Batch = tuple[Tensor, Tensor]
SIZES = ([5, 1], [4, 4], [6, 0], [2, 5])
NESTEROV = dict(lr=0.1, momentum=0.9, nesterov=True)


def coded_plan(codec: Codec, workers: int = 2, **settings: Any) -> Plan:
    return replace(server_plan(workers, **settings), codec=codec)


def make_rules(model: nn.Module, codec: Codec) -> dict[str, Rule]:
    """Of one worker, for whole matrices."""
    momentum = dict(momentum=0.9, is_nesterov=True) if codec.name == "dgc" else {}
    return {
        name: make_rule(codec, Part(name=name, num_columns=one.shape[1], **momentum), 1)  # type: ignore[arg-type]
        for name, one in model.named_parameters()
        if one.dim() > 1
    }


def train_by_rules(model: nn.Module, codec: Codec, steps: Sequence[Sequence[Batch]]) -> list[float]:
    """Train one model with what the rules of all workers send; returns the losses."""
    rules = [make_rules(model, codec) for _ in steps[0]]
    optimizer = torch.optim.SGD(model.parameters(), **NESTEROV)  # type: ignore[arg-type]
    losses = []
    for step, parts in enumerate(steps):
        count = sum(len(targets) for _, targets in parts)
        total, loss_sum = dict[str, Tensor](), 0.0
        for own, (inputs, targets) in zip(rules, parts, strict=True):
            if not len(targets):
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
            loss.backward()
            loss_sum += loss.item()
            for name, one in model.named_parameters():
                assert one.grad is not None
                sent = own[name].exchange(step, [one.grad.flatten()]) if name in own else one.grad.flatten()
                total[name] = total[name] + sent if name in total else sent
        past = {}
        for name, one in model.named_parameters():
            one.grad = (total[name] / count).view(one.shape)
            if codec.name == "dgc" and name in rules[0]:
                past[name], one.grad = one.grad, None
        optimizer.step()
        for name, one in model.named_parameters():
            if name in past:
                one.data -= NESTEROV["lr"] * past[name]
        losses.append(loss_sum / count)
    return losses


@ranks(2)
@pytest.mark.parametrize("name", ["dgc", *(pytest.param(one, marks=pytest.mark.long) for one in ("topk", "powersgd"))])
def test_workers_with_codecs_are_one_process_with_their_rules(name: str) -> None:
    codec = some_codec(name, **(dict(rank=1) if name == "powersgd" else {}))
    model = MLP()
    alone = copy.deepcopy(model)
    steps = [cut(batch_of(sum(sizes), seed), sizes) for seed, sizes in enumerate(SIZES * 2)]

    def optimizer(given: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(given, **NESTEROV)  # type: ignore[arg-type]

    plan = coded_plan(codec, shards=2, bucket_bytes=2000)
    with served(model, plan, optimizer=optimizer) as trainer:
        losses = [float(trainer.step(*parts[trainer.data_rank])) for parts in steps]
    assert losses == pytest.approx(train_by_rules(alone, codec, steps), rel=1e-9)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


class Routed(nn.Module):
    """The first token says which of two layers a batch goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers[int(inputs[0, 0] > 0)](inputs)
        return output


def test_what_was_kept_is_sent_without_a_gradient_too() -> None:
    codec = some_codec("topk", density=0.2)
    torch.manual_seed(0)
    model = Routed()
    alone = copy.deepcopy(model)
    rules = make_rules(alone, codec)
    optimizer = SGD(alone.parameters())
    with served(model, coded_plan(codec, workers=1)) as trainer:
        for step, route in enumerate([0, 0, 1, 1, 0]):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(4, 6, dtype=torch.float64, generator=generator)
            inputs[0, 0] = 1.0 if route else -1.0
            targets = torch.randint(0, 3, (4,), generator=generator)
            trainer.step(inputs, targets)
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(inputs), targets).backward()
            for name, one in alone.named_parameters():
                if name in rules and (step > 1 or name.startswith("layers.0")):  # once used, always
                    given = torch.zeros_like(one) if one.grad is None else one.grad
                    one.grad = rules[name].exchange(step, [given.flatten()]).view(one.shape)
            optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.long
@ranks(2)
def test_a_language_model_learns_with_a_codec_and_clipping() -> None:
    """With float32 weights, parts that are cut over servers, a warm-up, and a norm clipped before dgc."""
    torch.manual_seed(0)
    codec = Codec(name="dgc", density=0.05, clip=1.0, dense_below=64, warmup_steps=4)
    plan = coded_plan(codec, shards=2, bucket_bytes=4096)
    batch = token_batch(8, seed=0)
    parts = cut(batch, [4, 4])
    with served(small_gpt(), plan, optimizer=lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)) as trainer:
        losses = [float(trainer.step(*parts[trainer.data_rank])) for _ in range(30)]
        found = torch.cat([one.detach().flatten() for one in trainer.named_model.parameters()])
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(one, found) for one in gathered(found))


def test_dgc_needs_sgd() -> None:
    with pytest.raises(PlanError, match=r"takes over the momentum of torch.optim.SGD, and this optimizer is RMSprop"):
        with served(MLP(), coded_plan(some_codec("dgc"), workers=1), optimizer=torch.optim.RMSprop):
            raise AssertionError


def masters(trainer: Trainer) -> dict[str, Tensor]:
    """What servers have, by name, of which a worker has rounded values."""
    sync = trainer.sync
    assert isinstance(sync, ServedSync)
    rounded = {one.name: one.tensor.detach().clone() for one in sync.pieces}
    with trainer.update.holding_state():
        found = {one.name: one.tensor.detach().clone() for one in sync.pieces}
        assert all(trainer.optimizer.state[one.tensor] for one in sync.pieces)
    assert all(torch.equal(one.tensor, rounded[one.name]) for one in sync.pieces)  # and goes on with them
    return found


@pytest.mark.parametrize("pull", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_workers_get_rounded_weights_and_servers_keep_their_own(pull: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[pull]
    model = MLP()
    alone = copy.deepcopy(model)
    weights = {name: nn.Parameter(one.detach().clone()) for name, one in alone.named_parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.01)
    with served(
        model, server_plan(1, shards=2, pull=pull), optimizer=lambda one: torch.optim.AdamW(one, lr=0.01)
    ) as trainer:
        assert isinstance(trainer.mesh, WorkerMesh)
        for seed in range(4):
            inputs, targets = batch_of(4, seed)
            with torch.no_grad():
                for name, one in alone.named_parameters():
                    one.copy_(weights[name].to(dtype))
            loss = nn.functional.cross_entropy(alone(inputs), targets)
            alone.zero_grad()
            loss.backward()
            for name, one in alone.named_parameters():
                weights[name].grad = one.grad
            optimizer.step()
            assert float(trainer.step(inputs, targets)) == pytest.approx(loss.item(), rel=1e-9)
            if seed % 2:
                for name, one in masters(trainer).items():
                    torch.testing.assert_close(one, weights[name].detach(), rtol=1e-9, atol=1e-11)
        for name, one in trainer.named_model.named_parameters():
            assert torch.equal(one, one.to(dtype).double())
            torch.testing.assert_close(one, weights[name].to(dtype).double(), rtol=1e-2, atol=1e-4)


def test_weights_of_16_bits_are_not_rounded_to_16_bits() -> None:
    with served(small_gpt().bfloat16(), server_plan(1, pull="bf16")) as trainer:
        with pytest.raises(PlanError, match=r"is bfloat16 there already; leave it out"):
            trainer.step(*token_batch(2))


def test_bf16_workers_lose_nothing_by_pulls_in_bf16() -> None:
    """They round what servers send anyway."""
    losses = []
    for pull in ("master", "bf16"):
        torch.manual_seed(0)
        plan = replace(server_plan(1, bucket_bytes=4096, pull=pull), precision=Precision(compute="bf16"))
        with served(small_gpt(), plan) as trainer:
            losses.append([float(trainer.step(*token_batch(4, seed=seed))) for seed in range(4)])
    assert losses[0] == losses[1]


@ranks(2)
def test_a_gradient_that_is_not_finite_is_told_with_a_codec() -> None:
    """Also without a norm: what it would leave in residuals would stay there."""
    inputs, targets = cut(batch_of(8, 0), [4, 4])[dist.get_rank()]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(output, targets)
        if dist.get_rank() == 1 and loss.is_bad:  # type: ignore[attr-defined]
            output.register_hook(lambda gradient: gradient * torch.nan)
        return found

    loss.is_bad = False  # type: ignore[attr-defined]
    with served(MLP(), coded_plan(some_codec("topk")), loss=loss, skip_at_most=1) as trainer:
        trainer.step(inputs, targets)
        before = [one.detach().clone() for one in trainer.named_model.parameters()]
        loss.is_bad = True  # type: ignore[attr-defined]
        trainer.step(inputs, targets)
        after = list(trainer.named_model.parameters())
        assert trainer.num_skipped == 1
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        loss.is_bad = False  # type: ignore[attr-defined]
        trainer.step(inputs, targets)
        assert all(one.isfinite().all() for one in trainer.named_model.parameters())
