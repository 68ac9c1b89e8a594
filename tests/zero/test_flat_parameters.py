"""Parameters in flat buffers: what is a window on what, what a rank keeps of each, and what is left when it is gone.

Groups here have several ranks and no handle, so nothing travels; the files beside this one test what ranks exchange.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import data_plan, small_convnet, small_gpt
from torch import Tensor, nn

from weft.blueprint import find_blueprint
from weft.comm.group import Group, Traffic
from weft.layout import Layout
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.parallel.zero.grouping import describe_parameters, torch_dtype
from weft.plan.partition.flat_buffers import FlatBuffer, flat_buffers
from weft.plan.partition.zero import Flat
from weft.plan.plan import Plan, Precision

CPU = torch.device("cpu")
OWN: dict[str, Any] = {}
MIXED = {"compute": "bfloat16"}
FROZEN = {"compute": "bfloat16", "trainable": False}


def group(size: int, index: int) -> Group:
    return Group(axis="data", purpose="test", ranks=tuple(range(size)), index=index, handle=None, traffic=Traffic())


def named(*shapes: tuple[int, ...], trainable: bool = True) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"p{number}", nn.Parameter(torch.randn(shape, generator=generator), requires_grad=trainable))
        for number, shape in enumerate(shapes)
    ]


def make_flat(
    members: list[tuple[str, nn.Parameter]], size: int, index: int, *, kind: Any = OWN, keep_whole: bool = True
) -> FlatParameters:
    names, parameters = zip(*members, strict=True)
    flat = Flat(numels=tuple(parameter.numel() for parameter in parameters), num_parts=size)
    return FlatParameters(
        FlatBuffer(flat=flat, names=names, **kind),
        parameters,
        layouts=[Layout(global_shape=tuple(parameter.shape)) for parameter in parameters],
        group=group(size, index),
        source=(),
        keep_whole=keep_whole,
        device=CPU,
        master_device=CPU,
    )


def same_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


SHAPES = ((5, 7), (), (3,), (1,), (4, 2, 6), (0, 4))
"""A matrix, one number, fewer numbers than ranks, one row, a cube, and nothing at all."""


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_of_all_ranks_are_the_whole(size: int) -> None:
    original = {name: parameter.detach().clone() for name, parameter in named(*SHAPES)}
    kept: dict[str, list[Tensor]] = {name: [] for name in original}
    for index in range(size):
        flat = make_flat(named(*SHAPES), size, index)
        for piece in flat.make_pieces():
            assert piece.layout.global_shape == tuple(original[piece.name].shape)
            assert piece.layout.is_whole == (size == 1)
            if size > 1:
                start, stop = piece.layout.flat_range or (0, 0)
                assert piece.tensor.shape == (stop - start,)
                assert torch.equal(piece.tensor, original[piece.name].flatten()[start:stop])
            else:
                assert piece.tensor.shape == original[piece.name].shape
            kept[piece.name].append(piece.tensor.detach().flatten())
    for name, parts in kept.items():
        assert torch.equal(torch.cat(parts), original[name].flatten())


@pytest.mark.parametrize("size", [1, 3])
def test_parameters_are_windows_and_nothing_is_kept_twice(size: int) -> None:
    members = named(*SHAPES)
    original = [parameter.detach().clone() for _, parameter in members]
    flat = make_flat(members, size, size - 1)
    for (_, parameter), value in zip(members, original, strict=True):
        assert torch.equal(parameter, value) and parameter.shape == value.shape
        assert same_memory(parameter, flat.whole)
    assert flat.master is flat.mine and same_memory(flat.mine, flat.whole)
    for piece in flat.make_pieces():
        if piece.tensor.numel():
            assert same_memory(piece.tensor, flat.whole)
    with torch.no_grad():  # the optimizer's tensors and the model's are one
        for piece in flat.make_pieces():
            piece.tensor.fill_(3.0)
    start, stop = flat.flat.part(size - 1)
    assert sum(int((parameter == 3).sum()) for _, parameter in members) > 0
    assert torch.equal(flat.whole[start:stop], flat.mine)


def test_masters_are_apart_only_where_they_must_be() -> None:
    flat = make_flat(named((40,), (9,)), 2, 1, kind=MIXED)
    assert flat.master.dtype == torch.float32 and flat.mine.dtype == torch.bfloat16
    assert not same_memory(flat.master, flat.whole) and same_memory(flat.mine, flat.whole)
    assert flat.master.untyped_storage().nbytes() == 4 * flat.flat.part_numel, "not a window on the staged whole"
    flat.master.fill_(1 / 3)
    flat.take_master()
    assert torch.equal(flat.mine, torch.full_like(flat.mine, 1 / 3))
    frozen = make_flat(named((40,), trainable=False), 2, 0, kind=FROZEN)
    assert frozen.master is frozen.mine and frozen.mine.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [OWN, MIXED, FROZEN], ids=["own", "mixed", "frozen"])
def test_what_is_freed_is_gone_and_comes_back(kind: dict[str, Any]) -> None:
    members = named(*SHAPES, trainable=kind.get("trainable", True))
    dtype = torch_dtype(kind.get("compute", "float32"))
    original = [parameter.detach().to(dtype).clone() for _, parameter in members]
    flat = make_flat(members, 1, 0, kind=kind, keep_whole=False)
    assert flat.whole.untyped_storage().nbytes() == 0 and not flat.is_whole
    absent = members[0][1]
    with pytest.raises(RuntimeError):
        absent + torch.ones(5, 7)
    assert bool(absent.detach().sum().isnan()) and absent.untyped_storage().nbytes() <= 8
    for _ in range(2):
        flat.start_gather()
        flat.start_gather()  # a second time it is whole already
        flat.wait()
        assert all(torch.equal(p, value) for (_, p), value in zip(members, original, strict=True))
        flat.free()
        flat.free()
        assert flat.whole.untyped_storage().nbytes() == 0


def test_views_that_autograd_saved_are_right_again_after_a_gather() -> None:
    members = named((4, 4))
    weight = members[0][1]
    flat = make_flat(members, 1, 0, keep_whole=False)
    flat.start_gather()
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.ones(2, 4) @ weight.detach().clone()
    y = x @ weight.t()
    flat.free()
    flat.start_gather()
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected)


# ---- which parameters share a buffer ----


def buffers_of(model: nn.Module, plan: Plan) -> list[FlatBuffer]:
    return flat_buffers(describe_parameters(model, find_blueprint(model).blocks), plan)


def units(model: nn.Module, plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    blocks = find_blueprint(model).blocks
    return [("" if one.block is None else blocks[one.block], one.names) for one in buffers_of(model, plan)]


def test_a_unit_is_a_block_and_the_rest_is_the_root() -> None:
    model = small_gpt(num_layers=12, tied=True)
    found = units(model, data_plan(2, shard="parameters"))
    assert [unit for unit, _ in found] == ["", *(f"blocks.{number}" for number in range(12))]
    assert found[0][1] == ("embedding.weight", "norm.weight")
    assert all(name.startswith(f"{unit}.") for unit, names in found[1:] for name in names)
    everything = [name for _, names in found for name in names]
    assert sorted(everything) == sorted(name for name, _ in model.named_parameters())


def test_what_two_blocks_share_is_the_roots() -> None:
    model = small_gpt(num_layers=3)
    model.blocks[2].mlp = model.blocks[0].mlp
    found = dict(units(model, data_plan(2, shard="parameters")))
    assert {"blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"} <= set(found[""])
    assert not any("mlp.up" in name for name in (*found["blocks.0"], *found["blocks.2"]))
    model = small_gpt(num_layers=2)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)  # one block three times: all of it is shared
    assert [unit for unit, _ in units(model, data_plan(2, shard="parameters"))] == [""]


@pytest.mark.parametrize("shard", ["nothing", "optimizer", "parameters"])
def test_buffers_hold_one_kind_only(shard: str) -> None:
    model = small_convnet()
    model.stem.requires_grad_(False)
    plan = data_plan(2, shard=shard)
    plan = Plan(axes=plan.axes, data=plan.data, precision=Precision(compute="bf16"))
    for inside in buffers_of(model, plan):
        assert {model.get_parameter(name).requires_grad for name in inside.names} == {inside.trainable}
        is_norm = {isinstance(model.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d) for name in inside.names}
        assert len(is_norm) == 1 and inside.compute == ("float32" if is_norm.pop() else "bfloat16")
        assert shard == "parameters" or inside.trainable
