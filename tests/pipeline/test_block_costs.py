"""Timing parts of a model: what is counted, what is timed once, and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import logging
import time
import weakref
from typing import Any

import pytest
import torch
from oracle import small_gpt
from torch import Tensor, nn

from weft.blueprint import find_blueprint
from weft.parallel.pipeline.block_costs import Unit, time_units
from weft.parallel.recompute import recompute_blocks
from weft.plan.pipeline.stage_cuts import balance, check_cuts

CPU = torch.device("cpu")


def like(*shape: int, dtype: torch.dtype = torch.float32, flows: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=flows and dtype.is_floating_point)


def unit(module: nn.Module, *args: Any, name: str = "unit", **kwargs: Any) -> Unit:
    return Unit(name=name, module=module, args=args, kwargs=kwargs)


class Clocked(nn.Linear):
    """A layer whose forward takes as long as it is told, on a clock of its own."""

    now_s = 0.0
    runs: list[float] = []

    def forward(self, x: Tensor, *, takes_s: tuple[float, ...] = (1.0,)) -> Tensor:
        Clocked.now_s += takes_s[len(Clocked.runs) % len(takes_s)]
        Clocked.runs.append(Clocked.now_s)
        return super().forward(x)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: Clocked.now_s)
    monkeypatch.setattr(Clocked, "now_s", 0.0)
    monkeypatch.setattr(Clocked, "runs", [])


@pytest.mark.usefixtures("clock")
def test_the_median_after_a_warm_up() -> None:
    (cost,) = time_units([unit(Clocked(2, 2), like(1, 2), takes_s=(8.0, 0.001, 0.002, 0.009, 0.003, 0.004))], CPU)
    assert cost.time_s == pytest.approx(0.003) and len(Clocked.runs) == 6


@pytest.mark.usefixtures("clock")
def test_slow_units_run_less_often() -> None:
    (cost,) = time_units([unit(Clocked(2, 2), like(1, 2), takes_s=(8.0, 1.0, 1.0, 5.0))], CPU)
    assert cost.time_s == 1.0 and len(Clocked.runs) == 4


@pytest.mark.usefixtures("clock")
def test_equal_units_are_timed_once_and_different_ones_each() -> None:
    alike = [unit(Clocked(2, 2), like(1, 2), takes_s=(1.0,)) for _ in range(5)]
    assert len(set(time_units(alike, CPU))) == 1 and len(Clocked.runs) == 4
    others = [
        unit(Clocked(2, 3), like(1, 2), takes_s=(1.0,)),
        unit(Clocked(2, 2, bias=False), like(1, 2), takes_s=(1.0,)),
        unit(Clocked(2, 2).eval(), like(1, 2), takes_s=(1.0,)),
        unit(Clocked(2, 2), like(3, 2), takes_s=(1.0,)),
        unit(Clocked(2, 2), like(1, 2, flows=False), takes_s=(1.0,)),
        unit(Clocked(2, 2), like(1, 2), takes_s=(2.0,)),
        unit(nn.Sequential(Clocked(2, 2), nn.ReLU()), like(1, 2)),
        unit(nn.Sequential(Clocked(2, 2), nn.GELU()), like(1, 2)),
    ]
    Clocked.runs.clear()
    time_units([*alike, *others], CPU)
    assert len(Clocked.runs) == 4 * (1 + len(others))


def bytes_of(module: nn.Module, *args: Any) -> tuple[int, int]:
    (cost,) = time_units([unit(module, *args)], CPU)
    assert cost.time_s > 0
    return cost.state_bytes, cost.activation_bytes


def test_bytes_written_out() -> None:
    linear = nn.Linear(8, 4)
    weights, row, result = 4 * (8 * 4 + 4), 4 * 2 * 8, 4 * 2 * 4
    assert bytes_of(linear, like(2, 8)) == (weights, row)
    assert bytes_of(nn.Sequential(linear, nn.ReLU()), like(2, 8)) == (weights, row + result)
    assert bytes_of(nn.Sequential(linear, nn.ReLU()), like(2, 8, flows=False)) == (weights, result)
    assert bytes_of(copy.deepcopy(linear).double(), like(2, 8, dtype=torch.float64)) == (2 * weights, 2 * row)
    assert bytes_of(nn.Embedding(10, 3), like(2, 5, dtype=torch.int64)) == (120, 0)
    assert bytes_of(linear.requires_grad_(False), like(2, 8, flows=False)) == (weights, 0)


class Nested(nn.Module):
    """Takes and returns trees; part of what it returns has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor], *, options: dict[str, Any]) -> dict[str, Any]:
        x, positions = pair
        assert options["causal"] and options["mask"].dtype == torch.bool
        return {"x": self.inner(x) * positions.cos(), "positions": positions, "none": None}


def test_trees_go_in_and_come_out() -> None:
    options = {"causal": True, "mask": like(3, dtype=torch.bool)}
    (cost,) = time_units([unit(Nested(), (like(2, 4), like(4, flows=False)), options=options)], CPU)
    assert cost.state_bytes == 80 and cost.activation_bytes > 0


def test_nothing_given_is_changed() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6))
    example = torch.randn(4, 6, requires_grad=True)
    before, values, state = copy.deepcopy(module.state_dict()), example.detach().clone(), torch.get_rng_state()
    with torch.no_grad():
        time_units([unit(module, example)], CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(example, values) and example.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_model_without_memory_is_timed_and_stays_so() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 2))
    with_memory = copy.deepcopy(module).to_empty(device=CPU)
    assert bytes_of(module, like(2, 3, 6, 6)) == bytes_of(with_memory, like(2, 3, 6, 6))
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class Remembered(nn.Linear):
    """Refers to itself, so that only the garbage collector would take it away."""

    weights: list[weakref.ref[Tensor]] = []

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.friends = [self]

    def forward(self, x: Tensor) -> Tensor:
        Remembered.weights.append(weakref.ref(self.weight))
        return super().forward(x)


def test_the_copy_is_freed_at_once() -> None:
    gc.disable()
    try:
        module = Remembered()
        time_units([unit(module, like(2, 4))], CPU)
        assert Remembered.weights and all(weight() is None for weight in Remembered.weights)
    finally:
        gc.enable()


class Refusing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"needs more than {tuple(x.shape)}\nand a second line")


def test_a_unit_that_cannot_run_alone_makes_all_count_by_parameters(caplog: pytest.LogCaptureFixture) -> None:
    units = [unit(nn.Linear(4, 4), like(2, 4)), unit(Refusing(4, 9), like(2, 4), name="blocks.1")]
    with caplog.at_level(logging.WARNING, logger="weft"):
        costs = time_units(units, CPU)
    assert [cost.state_bytes for cost in costs] == [80, 180]
    assert costs[1].time_s / costs[0].time_s == pytest.approx(180 / 80)
    (record,) = caplog.records
    assert '"blocks.1" cannot be timed alone (RuntimeError: needs more than (2, 4)); ' in record.getMessage()


def test_blocks_of_a_model_make_stages() -> None:
    with torch.device("meta"):
        model = small_gpt(num_layers=6)
    tokens = like(2, 8, dtype=torch.int64)
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    model(tokens)
    for block in model.blocks:
        block._forward_pre_hooks.clear()
    units = [
        Unit(name=str(number), module=block, args=args, kwargs=kwargs)
        for number, (block, (args, kwargs)) in enumerate(zip(model.blocks, given, strict=True))
    ]
    plain = time_units(units, CPU)
    assert len(set(plain)) == 1
    assert balance(plain, 3) == (2, 4)
    check_cuts(balance(plain, 3, last=plain[0]), len(plain))
    recompute_blocks(model, find_blueprint(model), "full")
    recomputed = time_units(units, CPU)
    activation_bytes = given[0][0][0].numel() * 4
    assert {cost.activation_bytes for cost in recomputed} == {activation_bytes}
    assert plain[0].activation_bytes > activation_bytes
