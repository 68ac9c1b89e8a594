"""Checks of `gpu_smoke.py` for single methods, whose paths on a GPU differ from those on a CPU.

The average of the weights and a batch that is not finite, where the GPU itself skips an update; what finds tensors that
are not finite; attention through a window in 16 bits; local steps against a loop written by hand; LARS and LAMB in
kernels on parts of tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.comm.objects import gather_values
from weft.layout import part_of
from weft.mesh import make_mesh
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.parallel.attention.attention_call import make_axes
from weft.parallel.state.finite import not_finite
from weft.plan.late_merges import exchanges_after
from weft.plan.partition.sequence import Band, make_places
from weft.plan.plan import Axes, Data, Plan
from weft.sync.local import LocalSync
from weft.world import World

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from split_attention import Case, assert_same, make_case, split  # noqa: E402

NUM_STEPS, BAD_STEP = 8, 4
FEATURES, CLASSES = 8, 10
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
"""For 16 bits: Adam makes whole steps of gradients that are rounding alone."""
LAYERWISE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lamb": functools.partial(LAMB, lr=0.02, weight_decay=0.1),
    "lars": functools.partial(LARS, lr=1.0, trust=0.02, weight_decay=0.1),
    "lars, normalised momentum": functools.partial(LARS, lr=0.02, variant="normalised-momentum"),
}

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def make_mlp(*, norms: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(32) if norms else nn.Identity()
    return nn.Sequential(nn.Linear(FEATURES, 32), norm, nn.Tanh(), nn.Linear(32, CLASSES)).double()


def make_batch(step: int, num_samples: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(num_samples, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (num_samples,), generator=generator)


def part(batch: Batch, index: int, size: int) -> Batch:
    rows = slice(*part_of(len(batch[0]), index, size))
    return batch[0][rows], batch[1][rows]


def make_trainer(model: nn.Module, plan: Plan, optimizer: MakeOptimizer = adamw) -> weft.Trainer:
    return weft.parallelize(model, plan, loss="cross-entropy", optimizer=optimizer, example=make_batch(0)[0][:2])


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def pieces_of(trainer: weft.Trainer) -> dict[str, Tensor]:
    return {piece.name: piece.tensor.detach() for piece in trainer.sync.pieces}


def all_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Told(logging.Handler):
    """Context that keeps what weft logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Told:
        logging.getLogger("weft").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("weft").removeHandler(self)


def check_average(plan: Plan) -> str:
    """Every update enters the average by its rule; one that is skipped changes neither it nor a weight, to the bit."""
    dtype = torch.float64 if plan.precision.compute == "model" else torch.float32
    with make_trainer(make_mlp().to(dtype), plan) as trainer, Told() as told:
        for step in range(NUM_STEPS):
            inputs, targets = part(make_batch(step), trainer.data_rank, trainer.data_size)
            if step == BAD_STEP and trainer.data_rank == trainer.data_size - 1:
                inputs[0, 0] = math.nan
            step_and_compare(trainer, (inputs.to(dtype), targets), is_bad=step == BAD_STEP)
        weights, held_out = copies(pieces_of(trainer)), [(make_batch(99)[0].to(dtype), make_batch(99)[1])]
        own, averaged = trainer.evaluate(held_out), trainer.evaluate(held_out, average=True)
        assert all_equal(pieces_of(trainer), weights), "an evaluation of the average changed weights"
        assert math.isfinite(averaged) and averaged != own, (averaged, own)
        named = [text for text in told.texts if f"step {BAD_STEP + 1} is skipped: the loss is not finite" in text]
        assert trainer.mesh.world.rank > 0 or (len(named) == 1 and "inputs" in named[0]), told.texts
    return f"{trainer.num_skipped} skipped, held-out {own:.4f}, averaged {averaged:.4f}"


def step_and_compare(trainer: weft.Trainer, batch: Batch, *, is_bad: bool) -> None:
    average, number = trainer.average, trainer.steps_done
    assert average is not None
    weights, skipped = copies(pieces_of(trainer)), trainer.num_skipped
    means = copies(average.means if average.has_begun else pieces_of(trainer))
    trainer.step(*batch)
    is_skipped = trainer.num_skipped > skipped
    assert is_skipped or not is_bad, f"step {number}, whose batch is not finite, was not skipped"
    assert is_skipped == all_equal(pieces_of(trainer), weights), f"step {number}: skipped {is_skipped}, weights differ"
    share = 0.0 if is_skipped else 1 - trainer.plan.average.decay
    for name, mean in average.means.items():
        old, new = means[name].to(mean.dtype), pieces_of(trainer)[name].to(mean.dtype)
        wanted = old + share * (new - old)
        tolerance = 0.0 if is_skipped else 1e-12 if mean.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(mean, wanted, rtol=tolerance, atol=tolerance)


def check_layerwise(plan: Plan, optimizer: MakeOptimizer) -> str:
    """On parts of tensors, some of them empty, an optimizer makes the steps that it makes on whole ones on a CPU."""
    model = make_mlp()
    whole = copy.deepcopy(model)
    alone = optimizer(whole.parameters(), fused=False)
    with make_trainer(model.float(), plan, optimizer) as trainer:
        for step in range(NUM_STEPS):
            inputs, targets = make_batch(step)
            alone.zero_grad()
            F.cross_entropy(whole(inputs), targets).backward()
            alone.step()
            inputs, targets = part((inputs, targets), trainer.data_rank, trainer.data_size)
            trainer.step(inputs.float(), targets)
        worst = distance(trainer, whole)
        assert worst <= 1e-4, f"a weight is off by {worst:.1e}, 1e-04 is allowed"
        by_kernels = all(group["fused"] for group in trainer.optimizer.param_groups)
    return f"by {'kernels' if by_kernels else 'functions'}, weights {worst:.0e}"


def check_not_finite(world: World) -> str:
    """Tensors that hold one value that is not finite are named, whatever their dtype, size and place of the value."""
    named, wanted = [], []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for size in (1, 33, 1_000_003):
            for value in (1.0, math.nan, math.inf, -math.inf):
                for place in (0, size // 2, size - 1):
                    tensor = torch.full((size,), -2.0, dtype=dtype, device=world.device)
                    tensor[place] = value
                    name = f"{dtype}, {size}, {value} at {place}"
                    named.append((name, tensor))
                    wanted += [] if math.isfinite(value) else [name]
    found = not_finite(named)
    assert sorted(found) == sorted(wanted), sorted(set(found) ^ set(wanted))[:5]
    return f"{len(wanted)} of {len(named)} named"


def check_windows(world: World) -> str:
    """Attention through windows over a split sequence, in 16 bits, is that of its definition in float64."""
    num_tokens = 1203 if world.device.type == "cuda" else 203
    num_cases = 0
    for ring, ulysses in sorted({(world.size, 1), (1, world.size), (world.size // 2, 2)} - {(1, 1), (0, 2)}):
        plan = Plan(axes=Axes(ring=ring, ulysses=ulysses))
        mesh = make_mesh(plan, world, groups=[("ring", "neighbours"), ("ulysses", "heads")])
        axes = make_axes(mesh)
        for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
            for band in (Band(before=0, after=0), Band(before=300, after=0), Band(before=40, after=40)):
                for mask in ("none", "both"):
                    places = make_places(num_tokens, ring=ring, ulysses=ulysses, layout="zigzag")
                    case = make_case(places, (4, 2, 64, 64), is_causal=band.after == 0, mask=mask, band=band)
                    case = on_device(case, world.device, dtype)
                    with world.device:
                        assert_same(split(case, axes), case, axes, tolerance)
                    num_cases += 1
        mesh.close()
    return f"{num_cases} cases"


def on_device(case: Case, device: torch.device, dtype: torch.dtype) -> Case:
    moved = {
        name: None if (mask := getattr(case, name)) is None else mask.to(device) for name in ("key_mask", "documents")
    }
    return dataclasses.replace(case, tensors=[one.to(device, dtype) for one in case.tensors], **moved)


def by_hand(
    data: Data, num_replicas: int, model: nn.Module, optimizer: MakeOptimizer, poisoned: tuple[int, int] | None
) -> list[list[nn.Module]]:
    """The replicas after every step, on the CPU. `poisoned`: step and replica whose batch is not finite."""
    replicas = [copy.deepcopy(model) for _ in range(num_replicas)]
    optimizers = [optimizer(replica.parameters(), fused=False) for replica in replicas]
    anchor, seen = copy.deepcopy(model), []
    outer = torch.optim.SGD(
        anchor.parameters(), lr=data.outer_lr, momentum=data.outer_momentum, nesterov=data.outer_momentum > 0
    )
    for step in range(NUM_STEPS):
        for number, (replica, inner) in enumerate(zip(replicas, optimizers, strict=True)):
            if poisoned != (step, number):
                inner.zero_grad()
                inputs, targets = part(make_batch(step), number, num_replicas)
                F.cross_entropy(replica(inputs), targets).backward()
                inner.step()
        if exchanges_after(data, step + 1):
            exchange_by_hand(data, anchor, outer, replicas, is_outer=step + 1 > data.switch_step)
        seen.append(copy.deepcopy(replicas))
    return seen


@torch.no_grad()
def exchange_by_hand(
    data: Data, anchor: nn.Module, outer: torch.optim.Optimizer, replicas: list[nn.Module], *, is_outer: bool
) -> None:
    for old, *new in zip(anchor.buffers(), *(one.buffers() for one in replicas), strict=True):
        old.copy_(torch.stack([one.double() for one in new]).mean(0))
    for old, *new in zip(anchor.parameters(), *(one.parameters() for one in replicas), strict=True):
        old.grad = old - torch.stack(list(new)).mean(0)
        if data.outer == "average" or not is_outer:
            old -= old.grad
    if data.outer == "nesterov" and is_outer:
        outer.step()
    for replica in replicas:
        replica.load_state_dict(anchor.state_dict())


def check_local(plan: Plan, *, is_poisoned: bool = False) -> str:
    """Replicas are those of a loop on one CPU after every step, and equal to the bit after an exchange.

    `is_poisoned`: a batch of the last replica is not finite; that one skips a step, and the others do not notice.
    """
    model = make_mlp(norms=not is_poisoned)
    optimizer, tolerance = adamw, 1e-9
    if plan.codec.name != "none" or plan.precision.compute != "model":
        model, optimizer, tolerance = model.float(), sgd, 1e-2
    worst, num_exchanges = 0.0, 0
    with make_trainer(copy.deepcopy(model), plan, optimizer) as trainer:
        mesh, sync = trainer.mesh, trainer.sync
        assert isinstance(sync, LocalSync)
        poisoned = (BAD_STEP, mesh.num_replicas - 1) if is_poisoned else None
        replicas = by_hand(plan.data, mesh.num_replicas, model.double(), optimizer, poisoned)
        for step, expected in enumerate(replicas):
            inputs, targets = part(make_batch(step), trainer.data_rank, trainer.data_size)
            if poisoned == (step, mesh.replica):
                inputs[:] = math.nan
            trainer.step(inputs.to(model_dtype(trainer)), targets)
            worst = max(worst, distance(trainer, expected[mesh.replica]))
            assert worst <= tolerance, f"a weight is off by {worst:.1e} after step {step + 1}, {tolerance:g} is allowed"
            digests = gather_values(digest(trainer), mesh.between_replicas("control"))
            assert (len(set(digests)) == 1) == exchanges_after(plan.data, step + 1), f"step {step + 1}: {digests}"
            num_exchanges += len(set(digests)) == 1
        assert trainer.num_skipped == (poisoned is not None and poisoned[1] == mesh.replica)
    return f"{num_exchanges} exchanges, weights {worst:.0e}"


def model_dtype(trainer: weft.Trainer) -> torch.dtype:
    return torch.float64 if pieces_of(trainer)["0.weight"].dtype == torch.float64 else torch.float32


def distance(trainer: weft.Trainer, expected: nn.Module) -> float:
    """The largest distance of a weight or a running statistic of this rank from those expected."""
    wanted, found = expected.state_dict(), dict(trainer.named_model.named_buffers())
    off = [(found[name].double().cpu() - wanted[name]).abs().max().item() for name in found]
    for piece in trainer.sync.pieces:
        first, last = piece.layout.flat_range or (0, wanted[piece.name].numel())
        true = wanted[piece.name].flatten()[first:last]
        off += [(piece.tensor.detach().double().cpu().flatten() - true).abs().max().item()] if last > first else []
    return max(off)


def digest(trainer: weft.Trainer) -> str:
    """Of the bytes of this rank's weights and running statistics."""
    own = [*pieces_of(trainer).values(), *trainer.named_model.buffers()]
    return hashlib.sha256(b"".join(one.detach().cpu().numpy().tobytes() for one in own)).hexdigest()
