"""Which optimizers may be given flat pieces of tensors: found out by trying; the others are refused, by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from oracle import data_plan, make_trainer, small_gpt, token_batch
from torch import nn

from weft.errors import PlanError
from weft.plan.plan import Plan, Precision
from weft.training.setup.probe_optimizer import is_elementwise

CPU = torch.device("cpu")
optim = torch.optim


class Scaled(optim.Optimizer):
    """Plain descent times a factor that depends on other elements."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter, factor in zip(parameters, self.factors(parameters), strict=True):
                parameter.sub_(parameter.grad * factor, alpha=group["lr"])

    def factors(self, parameters: list[torch.Tensor]) -> list[Any]:
        raise NotImplementedError


class LayerScaled(Scaled):
    """As in LARS: a weight's norm over its gradient's."""

    def factors(self, parameters: list[torch.Tensor]) -> list[Any]:
        return [parameter.norm() / parameter.grad.norm() for parameter in parameters]  # type: ignore[union-attr]


class GloballyScaled(Scaled):
    """As in D-Adaptation: one norm of all gradients together. On each rank it would be another."""

    def factors(self, parameters: list[torch.Tensor]) -> list[Any]:
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()  # type: ignore[union-attr]
        return [1 / norm] * len(parameters)


class RowScaled(Scaled):
    """As in Adam-mini: one factor per row, where there are rows."""

    def factors(self, parameters: list[torch.Tensor]) -> list[Any]:
        return [1 / (1 + parameter.grad.square().mean(-1, keepdim=True)) for parameter in parameters]  # type: ignore[union-attr]


class DecaysMatrices(Scaled):
    """Elementwise but for a look at the shape."""

    def factors(self, parameters: list[torch.Tensor]) -> list[Any]:
        return [2.0 if parameter.dim() > 1 else 1.0 for parameter in parameters]


class Sign(Scaled):
    """Hand-written and elementwise."""

    def factors(self, parameters: list[torch.Tensor]) -> list[Any]:
        return [1 / (parameter.grad.abs() + 1e-8) for parameter in parameters]  # type: ignore[union-attr]


def made(kind: Callable[..., optim.Optimizer], **settings: Any) -> Any:
    return functools.partial(kind, **settings)


ELEMENTWISE = {
    "sgd": made(optim.SGD, lr=0.1),
    "sgd, small rate": made(optim.SGD, lr=1e-6),
    "sgd, no rate yet": made(optim.SGD, lr=0.0),
    "sgd, everything": made(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd, damped": made(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "sgd, foreach": made(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd, fused": made(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": made(optim.Adam, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "adamw": made(optim.AdamW, lr=1e-3),
    "adamw, small rate": made(optim.AdamW, lr=1e-6),
    "adamw, foreach": made(optim.AdamW, lr=1e-3, foreach=True),
    "adamw, fused": made(optim.AdamW, lr=1e-3, fused=True),
    "adamw, rate in a tensor": made(optim.AdamW, lr=torch.tensor(1e-3)),
    "rmsprop": made(optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": made(optim.Adagrad, initial_accumulator_value=0.1),
    "nadam": made(optim.NAdam),
    "radam": made(optim.RAdam, weight_decay=0.1),
    "adamax": made(optim.Adamax),
    "adadelta": made(optim.Adadelta),
    "rprop": made(optim.Rprop),
    "asgd": made(optim.ASGD, t0=1),
    "hand-written": Sign,
}

OTHERS = {
    "muon": made(optim.Muon),
    "adafactor": made(optim.Adafactor),
    "adafactor, small rate": made(optim.Adafactor, lr=1e-6),
    "layer norms": LayerScaled,
    "layer norms, small rate": made(LayerScaled, lr=1e-6),
    "one norm for all": GloballyScaled,
    "rows": RowScaled,
    "a look at the shape": DecaysMatrices,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_that_do_not_notice(name: str) -> None:
    assert is_elementwise(ELEMENTWISE[name], CPU) is True


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_that_need_whole_tensors(name: str) -> None:
    assert is_elementwise(OTHERS[name], CPU) is False


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.SparseAdam])
def test_what_cannot_be_tried_is_not_judged(kind: type[optim.Optimizer]) -> None:
    assert is_elementwise(kind, CPU) is None


def bare() -> nn.Module:
    """All matrices, which is what Muon takes."""
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("name", [*OTHERS, "lbfgs"])
def test_sharding_refuses_them_by_name_and_leaves_the_model_alone(name: str, shard: str) -> None:
    factory = OTHERS.get(name, optim.LBFGS)
    kind = getattr(factory, "func", factory).__name__
    model = bare()
    before = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]
    with pytest.raises(PlanError, match=rf"{kind} needs whole tensors.*AdamW or SGD.*shard = \"nothing\""):
        make_trainer(model, data_plan(1, shard=shard), optimizer=factory)
    assert [(parameter, parameter.data_ptr()) for parameter in model.parameters()] == before


BF16 = Precision(compute="bf16")


def whole_plan(precision: Precision) -> Plan:
    return dataclasses.replace(data_plan(1, microbatches=2), precision=precision)


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["own", "bf16"])
@pytest.mark.parametrize("name", OTHERS)
def test_they_train_whole_parameters(name: str, precision: Precision) -> None:
    """Also where the optimizer works on masters: those keep the parameters' shapes."""
    model = bare()
    trainer = make_trainer(model, whole_plan(precision), optimizer=OTHERS[name])
    shapes = {piece.name: tuple(piece.tensor.shape) for piece in trainer.sync.pieces}
    assert shapes == {"0.weight": (6, 4), "1.weight": (3, 6)}
    before = [piece.tensor.detach().clone() for piece in trainer.sync.pieces]
    trainer.step(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
    for piece, old in zip(trainer.sync.pieces, before, strict=True):
        assert piece.tensor.dtype == torch.float32 and not torch.equal(piece.tensor, old)
        used = model.get_parameter(piece.name)
        assert torch.equal(used, piece.tensor.to(used.dtype))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_pieces_of_which_a_rank_has_nothing_are_no_trouble(name: str) -> None:
    """Ranks keep nothing of a small tensor, and the optimizer sees an empty one."""
    parameters = [nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(3))]
    optimizer = ELEMENTWISE[name]([{"params": parameters}])
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameters[0].numel() == 0


def test_a_gpt_trains_with_every_kind_of_state() -> None:
    for name in ("adagrad", "asgd", "nadam", "rprop"):
        trainer = make_trainer(small_gpt(), data_plan(1, shard="parameters"), optimizer=ELEMENTWISE[name])
        first, *_, last = [float(trainer.step(*token_batch(4))) for _ in range(4)]
        assert last < first, name
