"""One rank of a large world, without the machines: on torch's fake process group and the meta device."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.errors import LaunchError, ModelError
from weft.layout import Layout
from weft.mesh import make_mesh
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Comm, Data, Pipeline, Plan, Precision, Step, Tensor
from weft.training.meta_trainer import MetaTrainer
from weft.training.parallelize import parallelize
from weft.world import join_world

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
TINY = GPTConfig(vocab_size=64, context=32, num_layers=5, hidden=32, heads=4, kv_heads=2, bias=True, tied=False)
LARGE = Axes(pipeline=16, data=8, tensor=8)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def tiny(config: GPTConfig = TINY) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def look(plan: Plan, rank: int, model: Any = None, **changes: Any) -> MetaTrainer:
    """A trainer as one rank of the plan's ranks would have it."""
    given = {"example": torch.zeros(1, 32, dtype=torch.int64), "device": "meta", **changes}
    with fake_world(rank, plan.axes.num_ranks):
        made = parallelize(model or tiny(), plan, loss="cross-entropy", optimizer=ADAMW, **given)
    assert isinstance(made, MetaTrainer)
    return made


def mark(holders: torch.Tensor, layout: Layout, trainer: MetaTrainer) -> int:
    """Add one to every element of a whole tensor that a rank has; returns how many these are."""
    grid = trainer.mesh.grid
    sizes, coordinates = grid.axes.sizes, grid.coordinates(trainer.mesh.world.rank)
    places = torch.empty(layout.local_shape(sizes, coordinates), dtype=torch.int64)
    numbers = torch.arange(holders.numel()).view(layout.global_shape)
    for there, here in layout.windows(sizes, coordinates):
        places[here] = numbers[there]
    kept = places.flatten()
    if layout.flat_range is not None:
        kept = kept[slice(*layout.flat_range)]
    holders.view(-1)[kept] += 1
    return len(kept)


PLANS = [
    Plan(axes=Axes(pipeline=2, data=2, tensor=2), data=Data(shard="optimizer"), step=Step(microbatches=2)),
    Plan(
        axes=Axes(pipeline=2, ulysses=2, tensor=2),
        data=Data(shard="parameters"),
        step=Step(microbatches=4),
        pipeline=Pipeline(schedule="interleaved", chunks=2),
        precision=Precision(compute="bf16"),
    ),
    Plan(
        axes=Axes(
            pipeline=2,
            replicate=2,
            ring=2,
            tensor=2,
            order=("data", "pipeline", "replicate", "ring", "ulysses", "tensor"),
        ),
        data=Data(shard="parameters"),
        tensor=Tensor(sequence=True),
    ),
    Plan(axes=Axes(data=2, ring=2, tensor=2)),
]


@pytest.mark.sampled(long=3)
@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [*(pytest.param(plan, marks=pytest.mark.long) for plan in PLANS[:2]), *PLANS[2:]],
    ids=["zero-1", "interleaved zero-3", "ring zero-3", "no pipeline"],
)
def test_parts_of_all_ranks_are_the_whole_once_a_replica(plan: Plan) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in tiny().named_parameters()}
    holders = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    split: set[str] = set()
    for rank in range(plan.axes.num_ranks):
        trainer = look(plan, rank)
        assert trainer.num_parameters == sum(math.prod(shape) for shape in shapes.values())
        for piece in trainer.sync.pieces:
            assert piece.layout.global_shape == shapes[piece.name]
            assert mark(holders[piece.name], piece.layout, trainer) == piece.tensor.numel()
            split |= {piece.name} if piece.layout.splits else set()
    assert {"blocks.0.attention.qkv.weight", "blocks.4.mlp.down.weight", "embedding.weight", "head.weight"} <= split
    parts = plan.axes.pipeline * (1 if plan.data.shard == "nothing" else plan.axes.state)
    for name, counted in holders.items():
        expected = plan.axes.num_ranks // parts // (plan.axes.tensor if name in split else 1)
        assert bool((counted == expected).all()), name


def test_bytes_are_those_of_the_tensors() -> None:
    whole = look(Plan(), 0)
    num = whole.num_parameters
    memory = whole.state_memory()
    assert (memory.parameters, memory.gradients, memory.master, memory.optimizer) == (4 * num, 4 * num, 0, 8 * num)
    assert memory.buffers == 2 * 32 * 4 * 4
    sharded = look(Plan(axes=Axes(data=4), data=Data(shard="parameters"), precision=Precision(compute="bf16")), 1)
    flats = sharded.sync.flats
    part = sum(flat.flat.part_numel for flat in flats)
    kept = sum(piece.tensor.numel() for piece in sharded.sync.pieces)  # without padding
    memory = sharded.state_memory()
    assert (memory.parameters, memory.gradients, memory.master) == (2 * part, 4 * part, 4 * part)
    assert memory.optimizer == 8 * kept and num / 4 - 64 < kept <= part < num / 4 + 64
    outer = Data(sync="local", shard="optimizer", offload=True, outer="nesterov", outer_momentum=0.9)
    local = look(Plan(axes=Axes(replicate=2, data=4), data=outer), 1).state_memory()
    on_device = look(Plan(axes=Axes(replicate=2, data=4), data=replace(outer, offload=False)), 5)
    assert (local.outer, on_device.state_memory().outer) == (0, pytest.approx(2 * 4 * num / 4, rel=0.01))
    rule = "replica 1 of 2 along replicate: a Nesterov step (rate 1, momentum 0.9) after every step; an exchange sends"
    assert rule in on_device.describe()
    offloading = look(Plan(axes=Axes(data=4), data=Data(shard="optimizer", offload=True)), 1).state_memory()
    assert offloading.master == offloading.optimizer == 0 and 3.9 * num < offloading.host < 4.1 * num
    assert not sharded.optimizer.state and all(piece.tensor.grad is None for piece in sharded.sync.pieces)


@pytest.mark.parametrize(
    ("rank", "pipeline", "data", "tensor"),
    [
        (0, range(0, 1024, 64), range(0, 64, 8), range(8)),
        (517, range(5, 1024, 64), range(517, 576, 8), range(512, 520)),
        (1023, range(63, 1024, 64), range(967, 1024, 8), range(1016, 1024)),
    ],
)
def test_groups_of_1024_ranks(rank: int, pipeline: range, data: range, tensor: range) -> None:
    with fake_world(rank, 1024):
        world = join_world("meta")
        mesh = make_mesh(Plan(axes=LARGE), world)
        mesh.add_groups([("data", "activations"), ("pipeline:0,15", "tied")])
        groups = {"pipeline": ("totals", pipeline), "data": ("activations", data), "tensor": ("activations", tensor)}
        for axis, (purpose, ranks) in groups.items():
            group = mesh.group(axis, purpose)
            assert group.ranks == tuple(ranks) and group.ranks[group.index] == rank and group.handle is None
        assert mesh.everyone("control").size == 1024
        assert mesh.group("pipeline:0,15", "tied").ranks == ((pipeline[0], pipeline[15]) if rank != 517 else ())
    assert (world.local_rank, world.hosts[rank], len(set(world.hosts))) == (rank % 8, rank // 8, 128)


def test_nothing_can_be_run() -> None:
    trainer = look(PLANS[0], 3)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    calls = {
        "step": lambda: trainer.step(tokens, tokens),
        "flush": trainer.flush,
        "evaluate": lambda: trainer.evaluate([(tokens, tokens)]),
        "generate": lambda: trainer.generate([1], num_tokens=1, context=8),
        "save": lambda: trainer.save("nowhere"),
        "load": lambda: trainer.load("nowhere"),
        "check_divergence": trainer.check_divergence,
    }
    for name, call in calls.items():
        with pytest.raises(LaunchError, match=rf"{name}\(\) needs values and 8 ranks, and this is rank 3"):
            call()


def test_memory_of_a_host_may_be_asked_for() -> None:
    plan = Plan(axes=Axes(data=2), comm=Comm(transport="shared"))
    assert look(plan, 1).plan.comm.transport == "shared"


def test_what_is_half_fake_is_refused() -> None:
    with pytest.raises(LaunchError, match='"fake" one, whose other 7 ranks do not exist'):
        look(PLANS[0], 0, device="cpu")
    with pytest.raises(ModelError, match=r"(\d+) of (\d+) parameters and buffers have memory"):
        look(PLANS[0], 0, model=GPT(TINY))


# ---- 70B ----

SCRIPT = Path(__file__).parents[1] / "helpers" / "fake_world_70b.py"


def run_70b(kind: str, rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), kind, str(rank), json.dumps(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_70b(kind: str, rank: int, plan: dict[str, Any]) -> None:
    found = run_70b(kind, rank, plan)
    assert found["cpu_s"] < 30, "processor time of the whole process, so that a busy machine does not matter"
    assert found["peak_bytes"] < 1e9
    assert found["problems"] == []
    num = found["num_parameters"]
    assert num == {"llama": 68_976_648_192, "gpt": 50_186_166_272}[kind]
    # A sixteenth of the blocks; the ends of the model are on the first and last stage only.
    expected = num / (16 * 8)
    assert 0.95 * expected < found["stage_numel"] < 1.1 * expected
    assert found["part_numel"] == pytest.approx(found["stage_numel"] / 8, rel=1e-4)


@pytest.mark.long
def test_one_rank_of_1024_takes_seconds_and_little_memory() -> None:
    check_70b("llama", 517, {"data": {"shard": "parameters"}})


@pytest.mark.sampled(long=3)
@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.parametrize("rank", [0, 1023])
@pytest.mark.parametrize(
    "plan",
    [
        {"data": {"shard": "optimizer"}},
        {"axes": {"data": 2, "ring": 2, "ulysses": 2}, "data": {"shard": "parameters"}},
        {
            "axes": {"data": 4, "ulysses": 2},
            "data": {"shard": "parameters"},
            "pipeline": {"schedule": "interleaved", "chunks": 2},
            "tensor": {"sequence": True},
        },
    ],
    ids=["zero-1", "ring and ulysses", "interleaved"],
)
def test_any_rank_of_1024_under_other_plans(kind: str, rank: int, plan: dict[str, Any]) -> None:
    check_70b(kind, rank, plan)
